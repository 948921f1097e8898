"""The commands that run a configuration: fit, validate, test, predict, quantize, export."""
