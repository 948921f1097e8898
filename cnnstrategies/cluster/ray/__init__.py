"""Runs on a Ray cluster: one actor on each node starts ``fit`` as a program, and a driver watches them."""
