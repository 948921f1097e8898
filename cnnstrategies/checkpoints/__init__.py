"""Checkpoints: written whole, checked before a run starts from them."""
