"""``cnnstrategies tune``: measure which settings make training fastest."""
