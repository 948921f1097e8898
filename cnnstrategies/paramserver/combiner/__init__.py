"""Hierarchical aggregation: a node's gradients are averaged in shared memory, and one worker pushes the mean."""
