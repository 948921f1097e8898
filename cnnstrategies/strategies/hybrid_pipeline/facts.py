"""Facts about a run: differences from one device, the weight of a batch, and the usual number of samples."""

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from cnnstrategies.data.sampling import dealt
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.strategies.differences import RANDOM_DRAWS
from cnnstrategies.strategies.hybrid_pipeline.layout import differences_of_pipeline, warn_of_small_microbatches

OWN_DRAWS = "random draws of the network (as in dropout) are each microbatch's own"


def differences(placed: PlacedNetwork, batch_size: int | None) -> list[str]:
    """Return one line of text for each difference from a run on one device.

    Args:
        placed: The divided network.
        batch_size: Number of samples of a batch on each replica of the first stage; None if the number is not known.
    """
    if placed.runner.microbatches == 1 or placed.one_microbatch is not None:
        return []
    lines = differences_of_pipeline(placed.division.network, placed.runner.placement, batch_size)
    return [OWN_DRAWS if line == RANDOM_DRAWS else line for line in lines]


def warn_after_first_batch(placed: PlacedNetwork) -> None:
    """Warn if the first training batch was one microbatch, or if BatchNorm has few images in a microbatch."""
    if placed.one_microbatch is not None:
        rank_zero_warn(placed.one_microbatch)
    else:
        warn_of_small_microbatches(placed.division.network, placed.runner.sizes)


def weight_of_batch(trainer: Trainer) -> float:
    """Return the factor of the current batch's loss among the batches whose gradients are accumulated.

    The sampler of this package's data modules divides the samples of an optimizer's step among these batches, whose
    sizes may differ. Each sample has the same weight.
    """
    sampler = dealt(trainer)
    if sampler is None:
        return 1.0
    return sampler.weight(trainer.fit_loop.batch_idx, trainer.num_training_batches, "by_sample")


def usual_samples(trainer: Trainer, placement: Placement) -> int:
    """Return the number of samples of a global batch that is not the last batch of an epoch; 0 if it is not known."""
    of_replica = getattr(trainer.train_dataloader, "usual", None)
    return (of_replica or 0) * placement.replicas[0]
