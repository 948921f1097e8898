"""Networks that are cut into stages, each of which runs on one rank or on several replicas.

The package needs only torch, so a script without Lightning can use it. It contains two ways to run the stages:

- `placed_network.PlacedNetwork` runs the user's own program on every rank, by the rules of :mod:`cnnstrategies.placed`.
  The strategy ``hybrid_pipeline`` uses it.
- `engine.Pipeline` runs a training step of its own, with a loss function, for scripts in plain torch.

Files for both ways:

- Layout: `timetable` (stages, replicas, numbering of the ranks, order of the tasks), `microbatches`, `timeline`
  (pictures).
- Messages: `transport` (connections of a rank), `channels` and `tensor_headers` (messages of a stage), `gradients`
  (sums in buckets).
- Tasks: `task_times` (runs and measures a rank's tasks).
- Tracing: `tracing` (graph and cuts), `leaf_tracer` and `open_tracer` (which modules are opened), `whole_modules` (why
  others are not), `own_code`, `outside_reads` and `graph_checks` (what a graph must not lose), `untouched` (tracing
  leaves no trace), `node_uses` (tensors that nodes use).
- Inputs: `network_inputs`.
- Stages: `stage` (cuts a graph), `buffers` (buffers on replicas), `batch_statistics` (of BatchNorm).

Files for the user's own program:

- Division: `division` (stages that call the user's modules), `network_copies` (teachers), `rehearsal` (comparison with
  the network before training).
- Calls: `placed_network` (all calls), `placed_call` (one call as an autograd function), `whole_batch` (all forwards,
  then all backwards), `interleaved_batch` (1F1B), `stage_runner` and `replicas` (this rank's part), `batch_rows`,
  `part_gradients`, `call_sums` and `early_sums` (sums over the replicas), `second_forward`, `recomputed_forward` and
  `repeated_forward` (recomputation with stages and without them, and its checks),
  `double_backward`, `random_draws`, `ready_order` (of gradient hooks), `known_forms` (what ranks remember of calls).
- Values that forwards store: `stored_terms` (all calls), `stored_watch`, `module_states`, `watched`, `noted_contents`,
  `outside_variables` and `noted_state` (find and undo them), `storing_code` (who may store), `saved_copies`,
  `first_forward` (parameters that are set), `microbatch_terms`, `term_rules`, `combining`, `batch_terms` and
  `term_reports` (from the values of microbatches to those of the batch), `mixing` and `mixing_backward` (stages that
  mix samples).
- Declared losses: `declared_loss`, `loss_arguments`, `gradient_check`, `loss_verdict` and `late_verdicts` (whether the
  backwards of microbatches were right).

Files for `engine`: `engine_batch` (targets and outputs), `engine_step` (one batch) and `engine_loss` (parts of a mean).
"""
