"""From the global batch, which a configuration names, to the batch of one process, which is loaded."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from cnnstrategies.cluster.environment import check_world
from cnnstrategies.errors import ConfigurationError


def division(trainer: Trainer | None) -> tuple[int, int]:
    """What a trainer divides the samples of an optimizer step by.

    Args:
        trainer: The trainer; None where samples are loaded without one.

    Returns:
        The processes that load (with pipeline stages, those of the first one), and the batches that are accumulated.

    Raises:
        ConfigurationError: The batches that are accumulated change from epoch to epoch, or a launcher has started
            another number of processes.
    """
    if trainer is None:
        return 1, 1
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "global_batch_size with GradientAccumulationScheduler: the samples of a step change with its schedule; "
            "give batch_size, which is per process, and set global_batch_size to null"
        )
    check_world(trainer)
    # The strategy's word, not the world's size: with pipeline stages not every process loads.
    sampling = trainer.distributed_sampler_kwargs
    return 1 if sampling is None else sampling["num_replicas"], trainer.accumulate_grad_batches


def share(global_batch_size: int, processes: int, accumulated: int) -> int:
    """Samples of a batch of one process.

    Args:
        global_batch_size: Samples of an optimizer step, over all processes.
        processes: Processes that load.
        accumulated: Batches that each of them makes a step from.

    Raises:
        ConfigurationError: The samples do not divide evenly.
    """
    parts = processes * accumulated
    if global_batch_size % parts:
        lower = global_batch_size // parts * parts
        nearest = f"{lower} or {lower + parts}" if lower else str(parts)
        by = f"{processes} processes that load"
        if accumulated > 1:
            by += f" x accumulate_grad_batches={accumulated}"
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} does not divide evenly by {by}: use {nearest}, or batch_size, "
            "which is per process"
        )
    return global_batch_size // parts
