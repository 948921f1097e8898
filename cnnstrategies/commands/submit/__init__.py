"""``cnnstrategies submit``: a job for each kind of cluster."""
