"""Packing of images into tar files (shards), and random access to the packed images."""
