"""``tune``: trials of settings on the real devices, and the statistics by which a setting is chosen."""
