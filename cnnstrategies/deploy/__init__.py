"""Trained networks for use elsewhere: exported, quantised, asked."""
