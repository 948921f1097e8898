"""``cnnstrategies plan``: predict step times and costs of the strategies."""
