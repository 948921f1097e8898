"""Pipeline and data parallel training: the network is cut into stages, and a stage may have several replicas.

Every rank runs the user's own module, callbacks and optimizers. The files:

- The strategy: `strategy` (Lightning's interface), `base` (options, ranks, data and failures).
- Before a run: `chosen_network` (which network is divided), `checks` (refusals), `example_inputs`, `layout` (cuts,
  replicas and microbatches), `profiling` (for automatic cuts), `own_stage` (networks that are built in
  `configure_model`).
- A run: `connections` (groups and rules of a rank), `divided_run` (the divided module from set-up to end), `network`
  (calls of the divided network), `compiling`, `placed_module` (parameters, buffers, optimizers and checkpoints),
  `start_values`.
- Steps: `steps` (the user's steps and backwards), `order` (GPipe or 1F1B), `logs`, `metric_values`, `epoch_ends`.
- Data: `loading` (global batches on all ranks), `placed_batches` (who gets which tensors), `loading_ranks` (who
  loads), `loader_messages`.
- Measurements: `stage_times` (would other cuts be faster), `stage_shares` (shares of the replicas), `descriptions`
  (start panel).
"""

from cnnstrategies.strategies.hybrid_pipeline.strategy import HybridPipelineStrategy

__all__ = ["HybridPipelineStrategy"]
