"""Atomic writing of checkpoints, and checks of a checkpoint before a run starts from it."""
