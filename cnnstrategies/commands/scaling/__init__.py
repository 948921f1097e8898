"""``cnnstrategies scaling``: the causes why more devices are not faster."""
