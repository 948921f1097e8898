"""The commands that run a configuration: fit, validate, test, predict, export, quantize."""
