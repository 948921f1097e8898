"""What a run on several processes does in another way than one device, in words."""

from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.pipeline.buffers import has_batch_norm

RANK_ZERO = "those of rank 0"
OWN_MEANS = (
    "a loss that is no mean over images (class weights, ignore_index, Dice, pairs of images) is a mean of each "
    "process's own"
)
RANDOM_DRAWS = "random draws (as in dropout) are each process's own"


def has_mean_loss(module: nn.Module) -> bool:
    """Whether a module says with ``loss_weight(targets)`` how its ``loss(outputs, targets)`` is divided.

    A class that replaces ``loss`` alone does not.
    """
    for kind in type(module).__mro__:
        if "loss_weight" in vars(kind):
            return callable(getattr(module, "loss", None))
        if "loss" in vars(kind):
            return False
    return False


def differences_of_replicas(network: nn.Module, processes: int, batch_size: int | None, statistics: str) -> list[str]:
    """What is different when each process trains the whole network on its share of the batch, a line each.

    Args:
        batch_size: Samples of a process's batch; None where they are not known.
        statistics: Whose the running statistics of batch normalisation are.
    """
    if processes == 1:
        return []
    rest = [OWN_MEANS] if isinstance(network, LightningModule) and not has_mean_loss(network) else []
    rest.append(RANDOM_DRAWS)
    if not has_batch_norm(network):
        return rest
    images = "own images" if batch_size is None else f"{batch_size} images"
    return [
        f"BatchNorm normalises over each process's {images}",
        f"BatchNorm's running statistics are {statistics}",
        *rest,
    ]
