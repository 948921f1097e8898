"""Runs on a Ray cluster: an actor on each node starts ``fit`` as a program, and a driver watches the actors."""
