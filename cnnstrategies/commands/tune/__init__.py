"""``cnnstrategies tune``: the fastest settings, by measurement."""
