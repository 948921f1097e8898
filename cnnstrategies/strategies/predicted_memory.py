"""The predicted peak memory of a rank, for the start panel."""

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from cnnstrategies.pipeline.tracing import seals, trace_open
from cnnstrategies.planning.measure import USUAL_STATES, states_of, update_of
from cnnstrategies.planning.measure_bytes import bytes_of
from cnnstrategies.planning.memory import NO_STATE, PeakMemory, State, replica_peak
from cnnstrategies.planning.recompute import recomputed_peak
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import example_inputs
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.protocol import facts_of

if TYPE_CHECKING:
    from torch.optim import Optimizer


def predicted_peaks(trainer: Trainer, samples: int | None) -> list[PeakMemory]:
    """Return the predicted peak memory of each rank in a training step, in rank order.

    The list is empty if the peaks are not known. A pipeline with automatic cuts knows them from the profile that has
    chosen the cuts. Where each rank trains the whole network, the network is traced, and its operations run on the meta
    device, which has no values. That needs inputs whose shapes are known, a network that can be traced, and full
    precision, because autocast does not exist on the meta device.

    Args:
        trainer: The trainer, which has begun to train.
        samples: Number of samples in a rank's batch; None if it is not known.
    """
    facts, module = facts_of(trainer.strategy), trainer.lightning_module
    if facts.step_kind == "stages":
        return list(facts.predicted_peaks)
    if samples is None or "mixed" in str(trainer.precision) or facts.shards_parameters:
        return []
    is_worker = facts.step_kind == "worker"
    if not (is_worker or isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)):
        return []
    peak = _replica_peak(trainer, module, samples, is_worker)
    return [] if peak is None else [peak] * trainer.world_size


def _replica_peak(trainer: Trainer, module: LightningModule, samples: int, is_worker: bool) -> PeakMemory | None:
    try:
        path = find_network(module, None)
        network = module_at(module, path)
        images = example_inputs(module, path, 2)
        if images is None:
            return None
        traced = trace_open(network, True)
        if seals(traced):
            return None  # The code of these modules would run, and may have effects.
        costs = bytes_of(traced, images, samples)
    # The network need not be one that can be traced. The trainer trains it as it is.
    except Exception:
        return None
    state = NO_STATE if is_worker else _state_of(trainer.optimizers, trainer.strategy.root_device)
    buckets = 1.0 if isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1 else 0.0
    if isinstance(forward := vars(network).get("forward"), RecomputedForward):
        return recomputed_peak(costs, state, trainer.accumulate_grad_batches, buckets, forward.division.cuts)
    return replica_peak(costs, state, trainer.accumulate_grad_batches, buckets)


def _state_of(optimizers: "list[Optimizer]", device: torch.device) -> State:
    if not optimizers:
        return State(USUAL_STATES)
    return State(states_of(optimizers[0]), update_of(optimizers[0], device))
