"""``cnnstrategies scaling``."""
