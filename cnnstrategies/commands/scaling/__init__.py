"""``cnnstrategies scaling``: find out why training on more devices is not faster."""
