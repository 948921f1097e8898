"""The commands of ``cnnstrategies``. Each command has a module or a subpackage.

The subpackage ``arguments`` declares all commands, parses their options and prints their help. Every start imports it,
so it imports neither torch nor Lightning.
"""
