"""Support for clusters: launchers, batch jobs, and connections between hosts."""
