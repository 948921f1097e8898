"""The machine's part in every run: processes, seeds, memory, files and loggers."""
