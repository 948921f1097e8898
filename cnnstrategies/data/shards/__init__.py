"""Images packed into tar files: how they are written, and how any of them is read by its number."""
