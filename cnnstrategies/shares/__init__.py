"""Shares: how much of each batch a rank gets, and how this changes while a run measures its ranks.

These words have one meaning each:

- A *share* is a rank's part of the work, relative to the other ranks' shares: 3 and 1, or 0.75 and 0.25.
- A *count* is the number of samples, or of microbatches, that a rank gets of one batch.
- To *deal* is to divide a number of samples or microbatches by shares, which gives counts.
- The *history* has the shares of a run, and the batch from which each of them is used.
- The *weight* of a rank's loss follows from its count, so that all samples of a step count equally.
- A *proposal* has new shares and the predicted gain in speed. A *bet* tries a proposal: it is won if the measured
  gain is above the noise, and otherwise the old shares are used again.
- To *rebalance* is to measure the ranks and to change their shares.

The files build on each other in this order: ``dealing``, ``options``, ``history``, ``samplers`` (the batches of data
modules), ``loaders`` (users' own DataLoaders), ``proposals``, ``bets``, and ``rebalancing``, a callback of Lightning.
A strategy takes part by :class:`~cnnstrategies.strategies.share_options.ShareOptions`, and
:class:`~cnnstrategies.strategies.sample_weights.SampleWeights` applies the weights. For a pipeline,
``planning.stage_shares`` makes the proposals.
"""
