"""Data parallel: what is sent, and what is measured."""

from collections.abc import Callable, Sequence

import test_data_parallel
import test_first_batch
from lightning.pytorch.strategies import DDPStrategy
from mutants.faulty import replaces

from cnnstrategies.callbacks.first_batch import check_lengths
from cnnstrategies.strategies import CompressedDDPStrategy


@replaces(
    check_lengths,
    killed_by=test_first_batch.test_processes_with_unequal_numbers_of_batches_are_refused,
)
def epochs_may_have_different_lengths(
    right: Callable[[Sequence[int], str], None], lengths: Sequence[int], others: str = ""
) -> None:
    pass


@replaces(
    CompressedDDPStrategy.configure_ddp,
    killed_by=test_data_parallel.test_compressed_gradients_stay_close_to_ddps,
)
def compressed_ddp_does_not_compress(
    right: Callable[[CompressedDDPStrategy], None], self: CompressedDDPStrategy
) -> None:
    DDPStrategy.configure_ddp(self)
