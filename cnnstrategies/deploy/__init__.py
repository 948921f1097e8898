"""Trained networks for use outside of training: export, quantisation and prediction."""
