"""The hybrid pipeline: stages with replicas, and the microbatches to run them with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timetable import Order
from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job, Prediction
from cnnstrategies.planning.predict import Predictor, predictor_for
from cnnstrategies.planning.stage_costs import sent_in_a_step

SEARCHES = 2  # after which the layouts that are known are only tried with other numbers of microbatches
SHOWN = 64  # devices up to which a pipeline is shown although data parallel is quicker than any
SMALLEST_SHARE = 8  # of the measured batch that a microbatch is at least, where only one batch size was measured


@dataclass(frozen=True)
class Chosen:
    """A layout with what it was chosen by."""

    layout: Layout
    predictor: Predictor


class Hybrid:
    """Layouts that the search finds, for several numbers of microbatches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.chosen: dict[int, Chosen] = {}
        self.known: list[Layout] = []
        self.searches = 0

    def candidates(self) -> Iterator[Candidate]:
        """The best layout for each number of microbatches; likelier numbers first, those that cannot win left out."""
        best = float("inf")
        for microbatches in self.microbatches:
            if self.least(microbatches) > 1.03 * best:
                continue
            predictor = self._predictor(microbatches)
            layout = predictor.fixed_layout() or self._best(predictor)
            if layout is not None and len(layout.replicas) == 1 and self.job.cluster.devices <= SHOWN:
                # No stages are best. For comparison the best of two, if there is one.
                predictor = self._predictor(microbatches, stages=2)
                layout = self._best(predictor)
            if layout is None or len(layout.replicas) == 1:
                continue
            best = min(best, predictor.time(layout) / self._samples(layout) * self.job.samples)
            candidate = self._candidate(layout, microbatches, predictor.placement(layout))
            if candidate.samples and candidate.samples >= 0.98 * self.job.samples:
                self.chosen[microbatches] = Chosen(layout, predictor)
                yield candidate

    def of(self, candidate: Candidate) -> Chosen:
        """What a candidate was chosen by."""
        return self.chosen[candidate.options["microbatches"]]

    def predict(self, candidate: Candidate) -> Prediction:
        """By the simulator."""
        chosen = self.of(candidate)
        layout, predictor = chosen.layout, chosen.predictor
        step = predictor.time(layout)
        return Prediction(
            step=step,
            samples=candidate.samples,
            sent_bytes=sent_in_a_step(predictor.costs, layout, predictor.request.microbatches),
            memory=max(predictor.stage_memory(layout, predictor.runs_ahead(layout))),
            bottleneck=self._bottleneck(chosen, step),
        )

    @cached_property
    def microbatches(self) -> list[int]:
        """The numbers of microbatches to try."""
        if self.job.microbatches is not None:
            return [self.job.microbatches]
        devices, profile = self.job.cluster.devices, self.job.profile
        most = self.job.samples
        if not profile.fixed:
            # Nothing is known of how much slower small batches are for each sample.
            most = min(most, max(devices, round(SMALLEST_SHARE * most / profile.costs.microbatch_size)))
        # With one device behind the others' stage, what they divide.
        most_replicas = devices - 1
        wanted = [4 * devices, 2 * most_replicas, 4 * most_replicas, 2 * devices, devices, most_replicas]
        return [count for count in dict.fromkeys(wanted) if 2 <= count <= most] or [min(devices, self.job.samples)]

    def least(self, microbatches: int) -> float:
        """Seconds that no layout falls below with so many microbatches: all devices computing all the time."""
        costs = self.job.profile.at(self.job.samples / microbatches)
        return microbatches * (costs.forward_time + costs.backward_time) / sum(self.job.cluster.speeds)

    def _predictor(self, microbatches: int, stages: int | None = None) -> Predictor:
        return predictor_for(self.job, microbatches, stages)

    def _best(self, predictor: Predictor) -> Layout | None:
        """By a search, or, once some layouts are known, the best of these."""
        request = predictor.request
        known = [one for one in self.known if len(one.replicas) > 1 and max(one.replicas) <= request.microbatches]
        if self.searches < SEARCHES or not known:
            self.searches += 1
            layout = predictor.search()
            if layout is not None:
                self.known.append(layout)
            return layout
        best = min(known, key=predictor.time)
        return best if predictor.time(best) < float("inf") else None

    def _samples(self, layout: Layout) -> int:
        """Of a step: the replicas of the first stage load as many each."""
        return self.job.share(layout.replicas[0]) or 1

    def _candidate(self, layout: Layout, microbatches: int, placement: Order) -> Candidate:
        options: dict[str, Any] = {"replicas": list(layout.replicas), "microbatches": microbatches}
        if len(self.job.cluster.hosts) > 1:
            options["placement"] = placement
        effect = Effect.LEARNING if self.job.profile.batch_norm else Effect.ROUNDING
        return Candidate("hybrid", options, effect, layout.devices, self._samples(layout))

    def _bottleneck(self, chosen: Chosen, step: float) -> Bottleneck:
        """What the step mostly consists of: the slowest stage's work, what it waits for, or filling and draining."""
        problem, layout = chosen.predictor.problem, chosen.layout
        microbatches = problem.request.microbatches
        bounds = (0, *layout.cuts, len(problem.costs.nodes))
        speed = min(problem.cluster.speeds)
        work = max(
            -(-microbatches // count) * float(problem.time_before[end] - problem.time_before[start]) / speed
            for count, start, end in zip(layout.replicas, bounds[:-1], bounds[1:], strict=True)
        )
        if step < 1.5 * work:
            return "compute"
        fill = problem.compute_time
        if step - work < 1.5 * fill:
            return "fill"
        return "nic" if len(problem.cluster.hosts) > 1 else "link"
