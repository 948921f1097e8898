"""Images packed into tar files: writing the files, and reading any image by its number."""
