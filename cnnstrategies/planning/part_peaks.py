"""Predict the peak memory of devices that each have a part of every image."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cnnstrategies.planning.costs import Profile
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.memory import (
    LOSS_TENSORS,
    Moment,
    OptimizerMemory,
    PeakMemory,
    at_moment,
    at_update,
    largest,
    part_memory,
)
from cnnstrategies.planning.recompute import recomputed_peak

# Bytes of gradients that the engine sums together; see `spatial.gradient_sums`, which imports torch.
MESSAGE_BYTES = 8 << 20
# Bytes of gradients that the groups of devices average together; see `strategies.spatial.replicas`.
AVERAGED_BYTES = 25 << 20


@dataclass(frozen=True)
class PartedStep:
    """A training step with divided images.

    Attributes:
        samples: Number of samples in a group's batch.
        state: Size of the training state.
        batches: Number of batches whose gradients are accumulated for a step.
        groups: Number of groups of devices.
        holds_batch: Whether the first device of a group holds whole batches while it hands out their rows. On
            accelerators it does not, because batches are in the host's memory then.
        recomputes: Whether activations are computed again.
        cuts: The segments' cuts then; None for those of `recomputed_peak`.
    """

    samples: int
    state: OptimizerMemory
    batches: int = 1
    groups: int = 1
    holds_batch: bool = False
    recomputes: bool = False
    cuts: tuple[int, ...] | None = None


def part_peaks(profile: Profile, parts: PartCosts, step: PartedStep) -> list[PeakMemory]:
    """Return the peak memory of each device of a group.

    Activations, images and outputs are divided. Parameters, gradients and the optimizer's state are not.

    Args:
        profile: Costs of the network on one device.
        parts: Costs of the parts.
        step: The training step.
    """
    return [largest(_phases(profile, parts, step, part)) for part in range(parts.parts)]


def _phases(profile: Profile, parts: PartCosts, step: PartedStep, part: int) -> Iterator[PeakMemory]:
    """Yield what a device holds in each phase of a step.

    Args:
        profile: See `part_peaks`.
        parts: See `part_peaks`.
        step: See `part_peaks`.
        part: Number of the device in its group.
    """
    costs = profile.at(step.samples * parts.shares[part])
    memory = part_memory(costs, 0, len(costs.nodes))
    held = PeakMemory(
        parameters=memory.parameters,
        optimizer=step.state.copies * memory.gradients,
        images=costs.input_bytes,
        framework=costs.framework_bytes,
    )
    # Gradients exist twice while they are joined. If they fit into one message, this is at the end of the backward.
    window, joined = round(step.samples * parts.window_bytes), min(MESSAGE_BYTES, parts.gradient_bytes)
    yield replace(held, gradients=memory.gradients, messages=joined)
    joined = joined if parts.gradient_bytes > MESSAGE_BYTES else 0
    if step.recomputes:
        peak = recomputed_peak(costs, step.state, step.batches, cuts=step.cuts)
        yield replace(peak, messages=window + joined)
    else:
        loss, earlier = costs.result_bytes, memory.gradients if step.batches > 1 else 0
        yield at_moment(held, memory.forward, memory.gradients, messages=window, outputs=LOSS_TENSORS * loss)
        yield at_moment(held, Moment(memory.saved), earlier, outputs=(LOSS_TENSORS + 1) * loss)
        # The sums of a backward are added to the gradients of earlier batches at its end.
        yield at_moment(held, memory.backward, earlier, messages=window + joined, outputs=costs.output_bytes)
    if step.groups > 1:
        bucket = max(memory.largest_layer, min(AVERAGED_BYTES, memory.gradients))
        yield replace(held, gradients=memory.gradients, messages=bucket)
    yield at_update(held, memory, step.state)
    if step.holds_batch and part == 0:
        # The whole images, and copies of all devices' rows.
        whole = profile.at(step.samples).input_bytes
        yield replace(held, gradients=memory.gradients, images=2 * whole)
