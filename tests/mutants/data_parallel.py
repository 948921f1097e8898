"""Data parallel: what is sent, and what is measured."""

from collections.abc import Callable, Sequence

import test_data_parallel
import test_first_batch
from lightning.pytorch.strategies import DDPStrategy
from mutants.faulty import replaces

from cnnstrategies.callbacks.first_batch import check_lengths
from cnnstrategies.strategies import CompressedDDPStrategy, LocalSGDStrategy


@replaces(
    check_lengths,
    killed_by=test_first_batch.test_processes_with_different_numbers_of_batches_are_refused_before_they_wait_for_each_other,
)
def epochs_may_have_different_lengths(
    right: Callable[[Sequence[int], str], None], lengths: Sequence[int], others: str = ""
) -> None:
    pass


@replaces(
    CompressedDDPStrategy.configure_ddp,
    killed_by=test_data_parallel.test_compressed_stays_close_and_local_steps_equal_ddp,
)
def compressed_ddp_does_not_compress(
    right: Callable[[CompressedDDPStrategy], None], self: CompressedDDPStrategy
) -> None:
    DDPStrategy.configure_ddp(self)


@replaces(
    LocalSGDStrategy.on_validation_start,
    killed_by=test_data_parallel.test_validation_and_the_end_of_fit_see_the_average_of_the_ranks,
)
def local_sgd_validates_what_each_rank_has_of_its_own(
    right: Callable[[LocalSGDStrategy], None], self: LocalSGDStrategy
) -> None:
    pass
