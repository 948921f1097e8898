"""One push for all workers of a node: their gradients are added up in shared memory."""
