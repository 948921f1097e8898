"""Training in which several ranks have parts of the same images, and groups of such ranks train on different batches.

Every rank runs the user's own module, callbacks and optimizers. The files:

- `strategy`: Lightning's interface.
- `groups`: numbering of the ranks, and their process groups.
- `loading`: one rank of each group loads batches; `parted_batches`: which tensors of a batch are divided.
- `replicas`: gradients, buffers and metrics over the groups; `waits`: kinds of waits.
- `panel`: rows of the start panel.
- `predictions`: predictions, once for each group.
- `checks`: refusals; `step_costs`: what the first step has sent; `same_weights`: comparison of the ranks' parameters.
"""

from cnnstrategies.strategies.spatial.strategy import SpatialStrategy

__all__ = ["SpatialStrategy"]
