"""``cnnstrategies plan``: predicted step times and costs of the strategies."""
