"""Data parallel: what is sent, and what is measured."""

from collections.abc import Callable

import test_data_parallel
from lightning.pytorch.strategies import DDPStrategy
from mutants.faulty import replaces

from cnnstrategies.strategies import CompressedDDPStrategy, LocalSGDStrategy


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
