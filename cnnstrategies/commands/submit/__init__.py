"""``cnnstrategies submit``: submit a run to a cluster."""
