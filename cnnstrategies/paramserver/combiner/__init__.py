"""One push for all workers of a node: they add their gradients up in memory that they share."""
