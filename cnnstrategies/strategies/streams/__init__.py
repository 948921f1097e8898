"""Division of streams (``IterableDataset``) among the processes and the loaders' workers.

``recognition`` finds out from the first samples whether a stream divides its samples itself. ``part`` yields the
batches of one worker of one process. ``reading`` starts the workers and brings their first samples together, and reads
the batches of a loader that divides a stream in its own way. If processes have different numbers of batches,
``agreement`` lets the processes end an epoch together. ``loader`` is the loader of one process, which can resume within
an epoch from a ``position``, with the state of the user's loader if it has one. ``sampler`` tells the strategies how
many samples each process has in a batch.
"""

from cnnstrategies.strategies.streams.loader import StreamLoader, divide_stream

__all__ = ["StreamLoader", "divide_stream"]
