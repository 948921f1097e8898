"""Launching on a cluster: batch jobs, launchers, several hosts."""
