"""``cnnstrategies tune`` and ``sweep``: settings that are tried."""
