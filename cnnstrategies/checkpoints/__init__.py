"""Checkpoints: complete files, which are checked before a run starts from them."""
