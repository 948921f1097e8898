"""Data parallel: what is sent, and what is measured."""

import test_data_parallel
import test_first_batch
from lightning.pytorch.strategies import DDPStrategy
from mutants.faulty import removes, replaces

from cnnstrategies.callbacks.first_batch import check_lengths
from cnnstrategies.strategies import CompressedDDPStrategy

removes(
    check_lengths,
    "epochs may have different lengths",
    killed_by=test_first_batch.test_processes_with_unequal_numbers_of_batches_are_refused,
)


@replaces(
    CompressedDDPStrategy.configure_ddp, killed_by=test_data_parallel.test_compressed_gradients_stay_close_to_ddps
)
def compressed_ddp_does_not_compress(right, self):
    DDPStrategy.configure_ddp(self)
