"""Train any CNN on several devices: how the work is divided is one line of YAML."""
