"""Use of trained networks: export, quantisation and prediction."""
