"""Processes, seeds, memory, loggers: what every run needs of the machine."""
