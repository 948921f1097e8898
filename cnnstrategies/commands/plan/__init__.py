"""``cnnstrategies plan``."""
