"""The predicted peak memory of a rank, for the start panel."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.network_inputs import network_inputs
from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from cnnstrategies.pipeline.tracing import seals, trace_open
from cnnstrategies.planning.costs import Profile
from cnnstrategies.planning.lighter import LighterPlan, lighter_parts, lighter_replicas
from cnnstrategies.planning.measure import AUTOCAST, USUAL_STATES, states_of, update_of
from cnnstrategies.planning.measure_bytes import META, bytes_of
from cnnstrategies.planning.measure_parts import part_costs
from cnnstrategies.planning.memory import NO_STATE, OptimizerMemory, PeakMemory, replica_peak, shared_slices
from cnnstrategies.planning.part_peaks import PartedStep, part_peaks
from cnnstrategies.planning.recompute import recomputed_peak
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import given_inputs
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.protocol import facts_of

# Precisions in which parameters, images and activations have the same dtype.
WHOLE = "64-true", "32-true", "bf16-true", "16-true"


class PredictedMemory(NamedTuple):
    """The predicted memory of a run.

    Attributes:
        peaks: Peak memory of each rank in a training step, in rank order; empty if it is not known.
        lighter: Plans that need less memory, those that change the step least first.
    """

    peaks: Sequence[PeakMemory] = ()
    lighter: Sequence[LighterPlan] = ()

    @property
    def plans(self) -> list[tuple[str, list[int]]]:
        """The run's own plan and the lighter ones, with what each rank takes beyond its parameters; see `Plan`."""
        plans = [LighterPlan("", self.peaks), *self.lighter] if self.peaks else []
        return [(plan.settings, [peak.total - peak.parameters for peak in plan.peaks]) for plan in plans]


def predicted_memory(trainer: Trainer, samples: int | None) -> PredictedMemory:
    """Return the predicted peak memory of each rank in a training step, and plans that need less.

    Both are empty if the peaks are not known. A pipeline with automatic cuts knows them from the profile that has
    chosen the cuts. Where each rank trains the whole network, the network is traced, and its operations run in the
    precision of the training with tensors that have no values. That needs inputs whose shapes are known, and a network
    that can be traced.

    Args:
        trainer: The trainer, which has begun to train.
        samples: Number of samples in a rank's batch; None if it is not known.
    """
    facts, module = facts_of(trainer.strategy), trainer.lightning_module
    if facts.step_kind == "stages":
        return PredictedMemory(facts.predicted_peaks, facts.lighter_plans)
    precision = str(trainer.precision)
    if samples is None or facts.shards_parameters or precision not in (*AUTOCAST, *WHOLE):
        return PredictedMemory()
    plans = [
        # The ranks are alike, or groups of ranks are.
        plan._replace(peaks=[*plan.peaks] * (trainer.world_size // len(plan.peaks)))
        for plan in _plans(trainer, module, samples)
    ]
    return PredictedMemory(plans[0].peaks, plans[1:]) if plans else PredictedMemory()


def _plans(trainer: Trainer, module: LightningModule, samples: int) -> list[LighterPlan]:
    """Return the run's own plan, and lighter ones; an empty list if nothing is known.

    The peaks are those of one rank if the ranks are alike, and otherwise of the ranks that have parts of the same
    images.
    """
    facts, device = facts_of(trainer.strategy), trainer.strategy.root_device
    options, buckets, division = facts.server_options, facts.gradient_buckets, facts.image_division
    if options is None and buckets is None and division is None:
        return []
    try:
        path = find_network(module, None)
        network = module_at(module, path)
        images = _inputs(module, network)
        if images is None:
            return []
        images = trainer.precision_plugin.convert_input(images)
        forward = vars(network).get("forward")
        recomputed = forward if isinstance(forward, RecomputedForward) else None
        traced = (recomputed and recomputed.traced) or trace_open(network, True)
        if seals(traced):
            return []  # The code of these modules would run, and may have effects.
        autocast = AUTOCAST.get(str(trainer.precision))
        costs = bytes_of(traced, images, samples, autocast, device)
        parts = division and part_costs(traced, images, *division, compact=1.0 if autocast is None else 0.5)
    # The network need not be one that can be traced. The trainer trains it as it is.
    except Exception:
        return []
    shared = 0 if options is None else shared_slices(costs, options.server_count(trainer.num_nodes))
    state = NO_STATE if options is not None else _state_of(trainer.optimizers, device)
    batches = trainer.accumulate_grad_batches if options is None else 1
    if parts is not None:
        groups = trainer.world_size // parts.parts
        cuts = None if recomputed is None else recomputed.division.cuts
        step = PartedStep(samples, state, batches, groups, device.type == "cpu", recomputed is not None, cuts)
        plan = LighterPlan("", part_peaks(Profile(costs), parts, step))
        return [plan, *lighter_parts(Profile(costs), parts, step)]
    if recomputed is not None:
        peak = recomputed_peak(costs, state, batches, buckets or 0.0, recomputed.division.cuts)
    else:
        peak = replica_peak(costs, state, batches, buckets or 0.0, shared)
    lighter = lighter_replicas(Profile(costs), samples, state, batches, buckets or 0.0, recomputed is not None)
    return [LighterPlan("", [peak]), *lighter]


def _inputs(module: LightningModule, network: nn.Module) -> Images | None:
    """Return inputs of a network whose shapes are known without a look at the data, which may have effects."""
    names = network_inputs(network)
    images = given_inputs(module, names)
    if images is not None:
        return images
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    return torch.empty(2, *shape, device=META) if shape is not None and len(names) == 1 else None


def _state_of(optimizers: list[Optimizer], device: torch.device) -> OptimizerMemory:
    if not optimizers:
        return OptimizerMemory(USUAL_STATES)
    return OptimizerMemory(states_of(optimizers[0]), update_of(optimizers[0], device))
