"""``cnnstrategies tune``: settings that are tried."""
