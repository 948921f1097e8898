"""The predicted peak of a device's memory, as a sum of named parts.

A training step has phases: forwards, backwards and the optimizer's update. The functions of this module add up what a
device holds in each phase, and return the phase with the largest sum. The parts of a peak are therefore those of one
moment: at the end of a forward, for example, all activations exist, and the gradients of the last step still exist,
because Lightning sets gradients to None between the forward and the backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from cnnstrategies.planning.costs import GraphCosts, format_bytes, kept_for_parts

# Largest numbers of messages that a stage's channels hold besides the inputs of its microbatches: receives that have
# begun before their tasks, and gradients that are being sent; see `AHEAD` and `MOST_GRADIENT_SENDS` in
# `pipeline.channels`, which imports torch.
RECEIVES_AHEAD, GRADIENT_SENDS = 4, 2
# The largest slice of a parameter server with several parameters, and the least number of slices of a server; see
# `paramserver.slicing`, which imports torch.
SHARED_BYTES, SLICES_OF_A_SERVER = 2**18, 4
# The loss of a batch holds the network's result and a tensor of this size that it saves, such as the logarithms of
# probabilities; in its backward also the gradient of one of them. Of these, the network's backward needs the result's
# gradient only.
LOSS_TENSORS = 2


@dataclass(frozen=True)
class PeakMemory:
    """Bytes that a device holds at the moment at which it holds most, as a sum of named parts.

    Attributes:
        parameters: Parameters and buffers of the network, or of the device's stage.
        gradients: Gradients of the parameters.
        optimizer: The optimizer's state.
        activations: Tensors that autograd keeps for backwards, for all microbatches that the device holds at once.
        messages: Buffers of messages: gradient buckets, and activations and gradients between stages.
        images: The batch.
        outputs: The network's results, and what the loss makes of them.
        workspaces: Tensors that live only during one operation, and gradients on their way through the network.
        framework: Memory that libraries take for themselves from torch's allocator, such as the workspace of cuBLAS.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    messages: int = 0
    images: int = 0
    outputs: int = 0
    workspaces: int = 0
    framework: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, int]:
        """Return the bytes of the parts that are not 0, the largest part first. Keys are the names of the parts."""
        sizes = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts().items())
        return f"{format_bytes(self.total)}: {parts}"


def largest(peaks: Iterable[PeakMemory]) -> PeakMemory:
    """Return the peak with the largest total."""
    return max(peaks, key=lambda peak: peak.total)


@dataclass(frozen=True)
class Update:
    """Temporary tensors of an optimizer's update.

    Attributes:
        of_all: Their size as a multiple of the size of all trained parameters.
        of_largest: Their size as a multiple of the size of the largest layer's parameters. An optimizer that updates
            one parameter after the other needs them for one parameter only.
    """

    of_all: float = 0.0
    of_largest: float = 0.0


NO_UPDATE = Update()


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer.

    Attributes:
        copies: Size of the optimizer's state as a multiple of the trained parameters' size.
        update: Temporary tensors of an update.
    """

    copies: int = 2
    update: Update = NO_UPDATE


# Workers of parameter servers keep no optimizer state, because the servers update the parameters.
NO_STATE = OptimizerMemory(0)


@dataclass(frozen=True)
class Moment:
    """Bytes of one microbatch at one moment of its forward or backward.

    Attributes:
        activations: Tensors that autograd keeps.
        gradients: Gradients of parameters that this backward has computed.
        workspaces: Tensors of the operation that runs, and gradients on their way.
    """

    activations: int = 0
    gradients: int = 0
    workspaces: int = 0


@dataclass(frozen=True)
class PartMemory:
    """Bytes of a part of the network, and of one microbatch in it.

    Attributes:
        parameters: Parameters and buffers.
        gradients: Gradients of all trained parameters.
        largest_layer: Largest trained parameters of a node.
        saved: Tensors that the part makes and autograd keeps.
        forward: Moment of the forward with most bytes.
        backward: Moment of the backward with most bytes, if each gradient is kept until the end of the backward.
        adding: Moment of the backward with most bytes, if each gradient is added to an existing gradient at once.
    """

    parameters: int
    gradients: int
    largest_layer: int
    saved: int
    forward: Moment
    backward: Moment
    adding: Moment


@kept_for_parts
def part_memory(costs: GraphCosts, start: int, end: int) -> PartMemory:
    """Return the bytes of the nodes ``[start, end)``, and of one microbatch in them.

    A search asks for hundreds of parts, so moments are compared by their sums, as numbers.
    """
    nodes = costs.nodes[start:end]
    forward = backward = adding = (0, 0, 0, 0)  # The sum, and the fields of `Moment`.
    saved = 0
    saved_before: list[int] = []  # For each node, the bytes that the nodes before it have saved.
    for node in nodes:
        saved_before.append(saved)
        saved += node.saved_bytes
        # While a node runs it holds its result and what it saves. Most results are saved as well.
        work = max(0, node.forward_bytes - node.saved_bytes)
        if saved + work > forward[0]:
            forward = (saved + work, saved, 0, work)
    gradients = 0
    flowing = costs.flowing_gradient_bytes[start:end]
    for node, before, passing in zip(reversed(nodes), reversed(saved_before), reversed(flowing), strict=True):
        work, kept, trained = passing + node.backward_bytes, before + node.saved_bytes, node.trained_bytes
        if kept + work > adding[0]:
            adding = (kept + work, kept, 0, work)
        if kept + gradients + work > backward[0]:
            new = min(trained, node.backward_bytes)  # Gradients of this node's parameters.
            backward = (kept + gradients + work, kept, gradients + new, work - new)
        gradients += trained
        if before + gradients > backward[0]:
            backward = (before + gradients, before, gradients, 0)
    return PartMemory(
        parameters=sum(node.parameter_bytes + node.buffer_bytes for node in nodes),
        gradients=gradients,
        largest_layer=max((node.trained_bytes for node in nodes), default=0),
        saved=saved,
        forward=Moment(*forward[1:]),
        backward=Moment(*backward[1:]),
        adding=Moment(*adding[1:]),
    )


def shared_slices(costs: GraphCosts, servers: int) -> int:
    """Return the bytes of the slices in which a parameter server's worker gathers the gradients of small parameters.

    Gradients of large parameters are pushed from where they are.

    Args:
        costs: Costs of the network.
        servers: Number of servers.
    """
    sizes = [node.trained_bytes for node in costs.nodes]
    most = min(SHARED_BYTES, sum(sizes) // (SLICES_OF_A_SERVER * servers))
    return sum(size for size in sizes if size <= most)


def replica_peak(
    costs: GraphCosts, state: OptimizerMemory, batches: int = 1, buckets: float = 0.0, shared: int = 0
) -> PeakMemory:
    """Return the peak of a device that trains the whole network, on the samples of ``costs``.

    Args:
        costs: Costs of the network for the device's samples of a batch.
        state: Size of the training state.
        batches: Number of batches whose gradients are accumulated for a step.
        buckets: Size of the buffers from which gradients are sent, as a multiple of the gradients' size.
        shared: Bytes of buffers that exist from a backward until the new parameters have arrived, before the end of the
            next forward; see :func:`shared_slices`.
    """
    part = part_memory(costs, 0, len(costs.nodes))
    held = PeakMemory(
        parameters=part.parameters,
        optimizer=state.copies * part.gradients,
        messages=round(buckets * part.gradients),
        images=costs.input_bytes,
        framework=costs.framework_bytes,
    )
    backward = part.backward if batches == 1 else part.adding
    gradients, loss = part.gradients if batches > 1 else 0, costs.result_bytes
    return largest(
        (
            at_moment(held, part.forward, part.gradients, outputs=LOSS_TENSORS * loss),
            at_moment(held, Moment(part.saved), gradients, messages=shared, outputs=(LOSS_TENSORS + 1) * loss),
            at_moment(held, backward, gradients, messages=shared, outputs=costs.output_bytes),
            at_update(replace(held, messages=held.messages + shared), part, state),
        )
    )


def segments_peak(
    costs: GraphCosts, cuts: Sequence[int], passing: int, state: OptimizerMemory, batches: int = 1, buckets: float = 0.0
) -> PeakMemory:
    """Return the peak of a device that trains the whole network, and computes activations again segment by segment.

    Args:
        costs: See :func:`replica_peak`.
        cuts: Index of the first node of each segment except the first, ascending.
        passing: Bytes of the values that pass from one segment to another, which are in memory until their backward.
        state: See :func:`replica_peak`.
        batches: See :func:`replica_peak`.
        buckets: See :func:`replica_peak`.
    """
    whole = part_memory(costs, 0, len(costs.nodes))
    held = PeakMemory(
        parameters=whole.parameters,
        optimizer=state.copies * whole.gradients,
        messages=round(buckets * whole.gradients),
        images=costs.input_bytes,
        framework=costs.framework_bytes,
    )
    peaks, later = [at_update(held, whole, state)], 0
    bounds = list(zip((0, *cuts), (*cuts, len(costs.nodes)), strict=True))
    for start, end in reversed(bounds):
        part = part_memory(costs, start, end)
        gradients = whole.gradients if batches > 1 else later
        moments = part.forward, part.backward if batches == 1 else part.adding
        peaks += [at_moment(held, moment, gradients, passing, outputs=costs.output_bytes) for moment in moments]
        if end == len(costs.nodes):
            # At the end of the forward, the gradients of the last step exist, and autocast's copies of all parameters.
            copied = sum(node.copied_bytes for node in costs.nodes[:start])
            loss = costs.result_bytes
            peaks += [
                at_moment(held, part.forward, whole.gradients, passing + copied, outputs=LOSS_TENSORS * loss),
                at_moment(held, Moment(part.saved), gradients, passing, outputs=(LOSS_TENSORS + 1) * loss),
            ]
        later += part.gradients
    return largest(peaks)


@dataclass(frozen=True)
class StageTraffic:
    """Bytes of one microbatch's messages.

    Attributes:
        received: Values that the stage receives from earlier stages.
        returned: Gradients that the stage sends back for them.
        awaited: Gradients that the stage receives for the values that it sends.
    """

    received: int = 0
    returned: int = 0
    awaited: int = 0


@dataclass(frozen=True)
class StageLoad:
    """The microbatches of a device in a step.

    Attributes:
        count: Number of microbatches that the device runs.
        held: Largest number of microbatches whose inputs the device holds at once.
        kept: Largest number of microbatches whose activations the device holds at once.
        interleaved: Whether backwards run between forwards, as in the order 1F1B.
        replicas: Number of replicas of the stage.
        images: Bytes of the images that the device holds.
        outputs: Bytes of the results and of the loss's tensors that the device holds.
    """

    count: int
    held: int
    kept: int
    interleaved: bool
    replicas: int
    images: int = 0
    outputs: int = 0


def stage_peak(
    part: PartMemory, traffic: StageTraffic, load: StageLoad, state: OptimizerMemory, framework: int = 0
) -> PeakMemory:
    """Return the peak of a device that runs a stage of a pipeline.

    Each backward of a microbatch computes its own gradients, which are then added to the sums over the microbatches.
    In the order 1F1B backwards run in the network's call, so that the last step's gradients exist beside the sums.

    Args:
        part: Bytes of the stage.
        traffic: Bytes of a microbatch's messages.
        load: The device's microbatches.
        state: Size of the training state.
        framework: See :class:`PeakMemory`.
    """
    held = PeakMemory(
        parameters=part.parameters,
        optimizer=state.copies * part.gradients,
        images=load.images,
        outputs=load.outputs,
        framework=framework,
    )
    last_step, sums = part.gradients, part.gradients if load.count > 1 else 0
    inputs, others = load.held * traffic.received, max(0, load.kept - 1)
    before = last_step if load.interleaved else 0
    phases = [
        # All microbatches that the device holds have run their forwards.
        at_moment(
            held,
            part.forward,
            last_step + (sums if load.interleaved and load.count > load.kept else 0),
            inputs + others * part.saved,
        ),
        # The first backward.
        at_moment(held, part.backward, before, inputs + others * part.saved, messages=_messages(traffic, others)),
    ]
    if load.count > 1:
        # A later backward, whose gradients are added to the sums tensor by tensor.
        if not load.interleaved or load.count <= load.kept:
            inputs, others = inputs - traffic.received, max(0, others - 1)
        moment = replace(part.backward, workspaces=max(part.backward.workspaces, part.largest_layer))
        phases.append(
            at_moment(held, moment, before + sums, inputs + others * part.saved, messages=_messages(traffic, others))
        )
    if load.replicas > 1:
        # The replicas' gradients are summed in buckets, which exist all at once.
        phases.append(replace(held, gradients=part.gradients, messages=part.gradients, outputs=0))
    return largest((*phases, at_update(held, part, state)))


def _messages(traffic: StageTraffic, waiting: int) -> int:
    return min(RECEIVES_AHEAD, waiting) * traffic.awaited + GRADIENT_SENDS * traffic.returned


def at_moment(
    held: PeakMemory, moment: Moment, gradients: int, activations: int = 0, messages: int = 0, outputs: int = 0
) -> PeakMemory:
    """Return what a device holds at a moment, with gradients and activations of other microbatches."""
    return replace(
        held,
        activations=moment.activations + activations,
        gradients=moment.gradients + gradients,
        workspaces=moment.workspaces,
        messages=held.messages + messages,
        outputs=held.outputs + outputs,
    )


def at_update(held: PeakMemory, part: PartMemory, state: OptimizerMemory) -> PeakMemory:
    """Return what a device holds during the update of the parameters."""
    work = state.update.of_all * part.gradients + state.update.of_largest * part.largest_layer
    return replace(held, gradients=part.gradients, workspaces=round(work), outputs=0)
