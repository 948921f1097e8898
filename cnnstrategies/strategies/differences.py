"""What a run on several processes does in another way than one device, in words."""

from torch import nn

from cnnstrategies.pipeline.batchnorm import has_batch_norm

RANK_ZERO = "those of rank 0"
RANDOM_DRAWS = "random draws (as in dropout) are each process's own"


def differences_of_replicas(network: nn.Module, processes: int, batch_size: int | None, statistics: str) -> list[str]:
    """What is different when each process trains the whole network on its share of the batch.

    Args:
        network: What is trained.
        processes: How many there are.
        batch_size: Samples of a process's batch; None where they are not known.
        statistics: Whose the running statistics of batch normalisation are.

    Returns:
        One line each; none for one process.
    """
    if processes == 1:
        return []
    if not has_batch_norm(network):
        return [RANDOM_DRAWS]
    images = "own images" if batch_size is None else f"{batch_size} images"
    return [
        f"BatchNorm normalises over each process's {images}",
        f"BatchNorm's running statistics are {statistics}",
        RANDOM_DRAWS,
    ]
