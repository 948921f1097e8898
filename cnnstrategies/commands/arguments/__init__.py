"""Declarations of all commands, with their parser and their help. Importing this package must not take long."""
