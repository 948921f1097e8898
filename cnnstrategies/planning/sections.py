"""The stages of a layout, and the peak memory of a device of a stage."""

from bisect import bisect_right
from typing import NamedTuple

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import GraphCosts, Value, kept_for_parts
from cnnstrategies.planning.memory import PeakMemory, StageLoad, StageTraffic, part_memory, stage_peak


class Section(NamedTuple):
    """The nodes and the devices of a stage.

    Attributes:
        start: Index of the stage's first node.
        end: Index of the stage's last node, plus 1.
        first: Number of the stage's first device.
        replicas: Number of replicas of the stage, which use consecutive devices.
        awaited: Bytes of the gradients that later stages send to this stage for a microbatch.
    """

    start: int
    end: int
    first: int
    replicas: int
    awaited: int = 0


class Crossing(NamedTuple):
    """The values that enter and leave a stage, for one microbatch.

    Attributes:
        received: Bytes of the values that the stage receives from earlier stages.
        returned: Bytes of the gradients that the stage sends back for them.
        sent: Values with gradients that the stage sends to later stages.
    """

    received: int
    returned: int
    sent: tuple[Value, ...]


@kept_for_parts
def _crossing(costs: GraphCosts, start: int, end: int) -> Crossing:
    """Return what enters and leaves the stage with nodes ``[start, end)``, for one microbatch."""
    received = [
        value
        for value in costs.values
        if value.producer < start and any(start <= consumer < end for consumer in value.consumers)
    ]
    return Crossing(
        sum(value.bytes for value in received),
        sum(value.gradient_bytes for value in received),
        tuple(
            value
            for value in costs.values
            if start <= value.producer < end and value.gradient_bytes and max(value.consumers) >= end
        ),
    )


class StageMemory:
    """The peak memory of the devices of a pipeline.

    Args:
        job: The job, with the number of microbatches.
        costs: Costs of the network for one microbatch.
    """

    def __init__(self, job: Job, costs: GraphCosts) -> None:
        assert job.microbatches is not None
        self.job, self.costs, self.microbatches = job, costs, job.microbatches
        # Cached results of `peak`, by its arguments.
        self._peaks: dict[tuple[Section, int, int], PeakMemory] = {}

    def kept(self, peak: int) -> int:
        """Return the largest number of microbatches whose activations a device holds at once.

        Args:
            peak: Largest number of microbatches whose inputs a device holds at once.
        """
        # Recomputed activations live as long as one backward. Under `except_last`, the last microbatch's activations
        # are held at the same time.
        return min(peak, {"never": peak, "except_last": 2, "always": 1}[self.job.checkpointings[0]])

    def peak(self, section: Section, count: int, held: int) -> PeakMemory:
        """Return the peak memory of a device of a stage.

        Args:
            section: The stage.
            count: Number of microbatches that the device runs.
            held: Largest number of microbatches that the device holds at once.
        """
        key = (section, count, held)
        if key not in self._peaks:
            self._peaks[key] = self._peak(section, count, held)
        return self._peaks[key]

    def _peak(self, section: Section, count: int, held: int) -> PeakMemory:
        part = part_memory(self.costs, section.start, section.end)
        crossing = _crossing(self.costs, section.start, section.end)
        is_last = section.end == len(self.costs.nodes)
        # The last stage gets the masks with the batch.
        images = self.job.values.loaded if is_last else 0
        load = StageLoad(
            count=count,
            held=held,
            kept=self.kept(held),
            interleaved=self.job.schedule == "1f1b",
            replicas=section.replicas,
            images=images if section.start else count * self.costs.input_bytes,
            # The replicas of the last stage hold the results of the microbatches, the result of the whole batch, and
            # its gradient.
            outputs=3 * self.microbatches * self.costs.output_bytes if is_last else 0,
        )
        traffic = StageTraffic(crossing.received, crossing.returned, section.awaited)
        return stage_peak(part, traffic, load, self.job.state, self.costs.framework_bytes)

    def awaited(self, start: int, end: int, cuts: tuple[int, ...]) -> int:
        """Return the bytes of the gradients that later stages send back to a stage, for one microbatch.

        A stage that uses a value sends one gradient for it, even if several nodes of the stage use the value.
        """
        return sum(
            value.gradient_bytes
            * len({bisect_right(cuts, consumer) for consumer in value.consumers if consumer >= end})
            for value in _crossing(self.costs, start, end).sent
        )
