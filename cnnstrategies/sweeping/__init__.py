"""``cnnstrategies sweep``: values of a configuration, searched for by training with them."""
