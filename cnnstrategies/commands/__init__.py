"""The commands of the command line, one module or folder each.

``arguments`` finds, parses and describes the commands. Its imports are fast, because every start needs them.
"""
