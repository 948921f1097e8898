"""The commands that LightningCLI runs from a configuration: fit, validate, test, predict, quantize, export."""
