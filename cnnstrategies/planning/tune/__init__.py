"""``tune``: settings that are tried on the real devices, and the statistics that choose."""
