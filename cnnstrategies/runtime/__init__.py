"""Functions close to the operating system that all runs use: processes, seeds, memory, files and loggers."""
