"""The predicted peak memory of a rank, for the start panel."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from cnnstrategies.pipeline.tracing import seals, trace_open
from cnnstrategies.planning.measure import USUAL_STATES, states_of, update_of
from cnnstrategies.planning.measure_bytes import META, bytes_of
from cnnstrategies.planning.memory import NO_STATE, OptimizerMemory, PeakMemory, replica_peak, shared_slices
from cnnstrategies.planning.recompute import recomputed_peak
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import as_given
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.protocol import facts_of


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
    peak = _replica_peak(trainer, module, samples)
    return [] if peak is None else [peak] * trainer.world_size


def _replica_peak(trainer: Trainer, module: LightningModule, samples: int) -> PeakMemory | None:
    facts = facts_of(trainer.strategy)
    options, buckets = facts.server_options, facts.gradient_buckets
    if options is None and buckets is None:
        return None
    try:
        path = find_network(module, None)
        network = module_at(module, path)
        images = _inputs(module, network)
        if images is None:
            return None
        traced = trace_open(network, True)
        if seals(traced):
            return None  # The code of these modules would run, and may have effects.
        costs = bytes_of(traced, images, samples)
    # The network need not be one that can be traced. The trainer trains it as it is.
    except Exception:
        return None
    shared = 0 if options is None else shared_slices(costs, options.server_count(trainer.num_nodes))
    state = NO_STATE if options is not None else _state_of(trainer.optimizers, trainer.strategy.root_device)
    batches = trainer.accumulate_grad_batches if options is None else 1
    if isinstance(forward := vars(network).get("forward"), RecomputedForward):
        return recomputed_peak(costs, state, batches, buckets or 0.0, forward.division.cuts)
    return replica_peak(costs, state, batches, buckets or 0.0, shared)


def _inputs(module: LightningModule, network: nn.Module) -> Images | None:
    """Return inputs of a network whose shapes are known without a look at the data, which may have effects."""
    names, example = network_inputs(network), module.example_input_array
    arrays = example if isinstance(example, tuple) else (example,)
    if len(arrays) == len(names) and all(isinstance(array, Tensor) for array in arrays):
        return as_given(arrays)
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    return torch.empty(2, *shape, device=META) if shape is not None and len(names) == 1 else None


def _state_of(optimizers: list[Optimizer], device: torch.device) -> OptimizerMemory:
    if not optimizers:
        return OptimizerMemory(USUAL_STATES)
    return OptimizerMemory(states_of(optimizers[0]), update_of(optimizers[0], device))
