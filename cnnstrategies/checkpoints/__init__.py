"""Checkpoints and other files of a run: written whole, checked, found by words."""
