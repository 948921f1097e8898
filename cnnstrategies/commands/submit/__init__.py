"""``cnnstrategies submit``: send a run to a cluster."""
