"""The engine of ``tune``: it tries settings on the real devices and chooses the fastest by statistics."""
