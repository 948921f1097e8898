"""Texts for the start panel and ``verify``: how a run on several processes differs from a run on one device."""

from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.strategies.updated_buffers import updated_buffers

RANK_ZERO = "those of rank 0"
OWN_MEANS = (
    "a loss that is not a mean over images (class weights, ignore_index, Dice, pairs of images) is computed over each "
    "process's own images"
)
OWN_OTHER_LOSSES = (
    "a loss that is neither a mean over images nor a mean with a known divisor (Dice, pairs of images) is computed "
    "over each process's own images"
)
RANDOM_DRAWS = "random draws (as in dropout) are each process's own"


def has_mean_loss(module: nn.Module) -> bool:
    """Return whether a module has a method ``loss_weight(targets)`` that fits its method ``loss``.

    The method ``loss(outputs, targets)`` returns a mean, and ``loss_weight`` returns the divisor of this mean. If a
    subclass overrides only ``loss``, the inherited ``loss_weight`` may not fit, so the result is False.
    """
    for kind in type(module).__mro__:
        if "loss_weight" in vars(kind):
            return callable(getattr(module, "loss", None))
        if "loss" in vars(kind):
            return False
    return False


def differences_of_replicas(
    network: nn.Module,
    processes: int,
    batch_size: int | None,
    statistics: str,
    weighted: bool = False,
    owner: str = "process",
) -> list[str]:
    """Return one line of text for each way in which data parallelism differs from a run on one device.

    Args:
        network: The network, or the module that contains it.
        processes: Number of processes. Each process trains the whole network on its part of the global batch.
        batch_size: Number of samples in a batch of one process; None if the number is not known.
        statistics: End of the sentence "BatchNorm's running statistics are ...", such as `RANK_ZERO`.
        weighted: Whether ``SampleWeights`` weights the means in a loss by their divisors.
        owner: Name for what trains the whole network on a part of the batch: a process, or a group of processes.
    """
    if processes == 1:
        return []
    own_loss = isinstance(network, LightningModule) and not has_mean_loss(network)
    rest = [OWN_OTHER_LOSSES if weighted else OWN_MEANS] if own_loss else []
    rest.append(RANDOM_DRAWS)
    updated = updated_buffers(network)
    if updated:
        rest.append(
            f"buffers that layers update from each process's own images ({', '.join(updated)}) are {statistics}"
        )
    if has_batch_norm(network):
        images = "own images" if batch_size is None else f"{batch_size} image{'' if batch_size == 1 else 's'}"
        rest[:0] = [
            f"BatchNorm normalises over each process's {images}",
            f"BatchNorm's running statistics are {statistics}",
        ]
    return [line.replace("each process's", f"each {owner}'s") for line in rest]
