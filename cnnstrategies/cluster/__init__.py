"""Runs on a cluster: launchers, batch jobs and several hosts."""
