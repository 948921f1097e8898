"""A pipeline's layout: from what a user asks to one that can run, and in words."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from cnnstrategies._lightning_private import train_loader
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import samples_of
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.microbatches import Images, default_microbatches
from cnnstrategies.pipeline.timetable import (
    CHECKPOINTING,
    ORDERS,
    SCHEDULES,
    Checkpointing,
    Layout,
    Order,
    Placement,
    Schedule,
    even_replicas,
)
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import format_bytes
from cnnstrategies.planning.lighter import LighterPlan, lighter_stages
from cnnstrategies.planning.measure import USUAL_STATES, states_of, update_of
from cnnstrategies.planning.measure_links import measure_cluster
from cnnstrategies.planning.memory import NO_UPDATE, PeakMemory, largest
from cnnstrategies.planning.predict import Predictor, choose_layout
from cnnstrategies.planning.recut import Recut, recut
from cnnstrategies.quantities import size_in_bytes
from cnnstrategies.runtime.groups import broadcast_value
from cnnstrategies.shares.options import check_count, check_initial
from cnnstrategies.strategies.hybrid_pipeline.profiling import profile_of

DEFAULT_STAGES = 2
USUAL_SAMPLES = 8  # of a batch in each replica of the first stage, for a profile where they are not known


# From the samples of a step, seconds of each stage for a microbatch, and of the loss: better cuts.
Recutter = Callable[[int, Sequence[float], float], Recut | None]


@dataclass(frozen=True)
class ChosenLayout:
    """A layout that can run.

    Attributes:
        cuts: Names of modules, or positions.
        checkpointing: Whether activations are computed again in the backward.
        reason: Why the profile has chosen to compute activations again; None if it has not.
        planned: Whether the cuts are chosen by a profile, and so rank 0 has ``recut``.
        peaks: Predicted peak memory of a device, for each stage; empty without a profile.
        lighter: Plans that need less memory, with their peaks for each stage; empty without a profile.
    """

    cuts: Sequence[str | int]
    microbatches: int
    run_ahead: bool
    checkpointing: Checkpointing = "never"
    reason: str | None = None
    planned: bool = False
    recut: Recutter | None = None
    peaks: tuple[PeakMemory, ...] = ()
    lighter: tuple[LighterPlan, ...] = ()

    def panel_rows(self) -> list[tuple[str, str]]:
        """Return a row of the start panel if activations are computed again."""
        if self.checkpointing == "never":
            return []
        exception = ", except those of a rank's last microbatch" if self.checkpointing == "except_last" else ""
        reason = "as configured" if self.reason is None else self.reason
        return [("activations", f"computed again in the backward{exception}: {reason}")]


@dataclass(frozen=True)
class LayoutRequest:
    """The strategy's arguments that say how the network is divided; see there."""

    stages: int | None
    replicas: Sequence[int] | None
    cuts: Sequence[str] | None
    microbatches: int | None
    schedule: Schedule
    run_ahead: bool | None
    memory_limit: int | tuple[int, ...] | None
    activation_checkpointing: Checkpointing | None
    placement: Order
    shares: Literal["auto", "equal"] | Sequence[float]
    initial_shares: Literal["equal"] | Sequence[float]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the request from all options of the strategy."""
        limit = options["memory_limit"]
        size: int | tuple[int, ...] | None
        if isinstance(limit, list | tuple):
            size = tuple(size_in_bytes(limit_of_rank, "memory_limit") for limit_of_rank in limit)
        else:
            size = size_in_bytes(limit, "memory_limit")
        return cls(**{field.name: options[field.name] for field in fields(cls)} | {"memory_limit": size})

    def __post_init__(self) -> None:
        check_initial(self.initial_shares, self.shares)
        for name, value, accepted in (
            ("schedule", self.schedule, SCHEDULES),
            ("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING),
            ("placement", self.placement, ORDERS),
        ):
            if value is not None and value not in accepted:
                raise ConfigurationError(f"{name}={value!r}: accepted are {', '.join(accepted)}")
        for name, number in (("stages", self.stages), ("microbatches", self.microbatches)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name}={number}: at least 1 is needed; leave it out for the default")
        counts = {
            "stages": self.stages,
            "replicas": None if self.replicas is None else len(self.replicas),
            "cuts": None if self.cuts is None else len(self.cuts) + 1,
        }
        known = {name: count for name, count in counts.items() if count is not None}
        if len(set(known.values())) > 1:
            numbers = ", ".join(f"{name} make {count}" for name, count in known.items())
            raise ConfigurationError(f"the number of stages is not clear: {numbers}; leave all but one of them out")

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        if self.replicas is not None:
            return len(self.replicas)
        if self.cuts is not None:
            return len(self.cuts) + 1
        return self.stages or DEFAULT_STAGES

    def replicas_on(self, devices: int) -> tuple[int, ...]:
        """Replicas of each stage; a ConfigurationError where devices do not divide evenly and none are given."""
        return tuple(self.replicas) if self.replicas is not None else even_replicas(devices, self.stage_count)

    def placement_on(self, devices: int, microbatches: int = 0) -> Placement:
        """The numbering of the ranks, and which of so many microbatches each runs."""
        begins = self.initial_shares if self.shares == "auto" else self.shares
        shares = () if isinstance(begins, str) else tuple(begins)
        return Placement(self.replicas_on(devices), self.placement, microbatches, shares)

    def shares_on(self, devices: int) -> tuple[float, ...] | None:
        """The shares that are given, stage by stage."""
        placement = self.placement_on(devices)
        check_count(placement.shares or "equal", placement.world_size)
        stages = [placement.shares_of(stage) for stage in range(placement.stages)]
        return tuple(itertools.chain(*stages)) if placement.shares else None

    def memory_limit_on(self, devices: int) -> int | tuple[int, ...] | None:
        """The limit of all devices, or the limit of each device stage by stage."""
        if not isinstance(self.memory_limit, tuple):
            return self.memory_limit
        check_count(self.memory_limit, devices, "memory_limit")
        placement = self.placement_on(devices)
        return tuple(self.memory_limit[rank] for stage in range(placement.stages) for rank in placement.ranks(stage))

    def microbatches_on(self, devices: int, network: nn.Module, samples: int | None = None) -> int:
        """Microbatches of a global batch; batch normalisation wants larger ones, if a replica's samples are known."""
        if self.microbatches is not None:
            return self.microbatches
        return default_microbatches(self.replicas_on(devices), samples if has_batch_norm(network) else None)

    def choose(
        self,
        network: nn.Module,
        trainer: Trainer,
        devices: int,
        device: torch.device,
        example: Callable[[int], Images | None],
        first_schedule: Schedule | None = None,
    ) -> ChosenLayout:
        """The layout; automatic cuts are chosen by rank 0, which profiles the traced network. A collective.

        Args:
            network: The network.
            trainer: The trainer.
            devices: Number of devices.
            device: Device of this rank.
            example: Function that returns a number of example images, or None.
            first_schedule: Schedule of the first steps, in which activations are computed again; None if all steps have
                the same schedule.
        """
        replicas = self.replicas_on(devices)
        samples = _loaded_samples(trainer)
        microbatches = self.microbatches_on(devices, network, samples)
        if self.cuts is not None or self.stage_count == 1:
            # Without a profile nobody knows what fits.
            run_ahead = self.memory_limit is None if self.run_ahead is None else self.run_ahead
            return ChosenLayout(self.cuts or [], microbatches, run_ahead, self.activation_checkpointing or "never")
        whole = (samples or USUAL_SAMPLES) * replicas[0]
        images = example(max(1, whole // devices))
        if images is None:
            raise ConfigurationError(
                "cuts are chosen by a profile, and the size of the images is not known: name the cuts, set "
                "self.example_input_array in the module, or image_shape (C, H, W) in the data module"
            )
        cluster = measure_cluster(trainer.num_nodes, device)
        chosen: ChosenLayout | str | None = None
        recutter: Recutter | None = None
        if trainer.global_rank == 0:
            optimizers = trainer.strategy.optimizers
            try:
                job = Job(
                    profile=profile_of(network, images, max(1, whole // devices), device, trainer),
                    cluster=cluster,
                    samples=whole,
                    microbatches=microbatches,
                    replicas=replicas,
                    shares=self.shares_on(devices),
                    schedule=self.schedule,
                    activation_checkpointing=self.activation_checkpointing,
                    run_ahead=self.run_ahead,
                    state_copies=2 + (states_of(optimizers[0]) if optimizers else USUAL_STATES),
                    memory_limit=self.memory_limit_on(devices),
                    update=update_of(optimizers[0], device) if optimizers else NO_UPDATE,
                )
                layout, predictor = choose_layout(job)
                if first_schedule is not None and not _fits_first_steps(predictor.job, layout, first_schedule):
                    layout, predictor = choose_layout(replace(job, schedule=first_schedule))
                checkpointing = predictor.job.activation_checkpointing
                # Without a limit, as on a CPU, the first steps do not compute activations again.
                saves_memory = device.type == "cuda" or self.memory_limit is not None

                def peaks_of(predictor: Predictor, layout: Layout) -> tuple[PeakMemory, ...]:
                    peaks = predictor.stage_peaks(layout, predictor.runs_ahead(layout))
                    if first_schedule is None:
                        return tuple(peaks)
                    first = _in_first_steps(predictor.job, first_schedule, saves_memory)
                    return tuple(map(largest, zip(peaks, first.stage_peaks(layout, False), strict=True)))

                chosen = ChosenLayout(
                    list(layout.cuts),
                    microbatches,
                    predictor.runs_ahead(layout),
                    checkpointing or "never",
                    _reason(job, layout) if checkpointing != self.activation_checkpointing else None,
                    planned=True,
                    peaks=peaks_of(predictor, layout),
                    lighter=tuple(
                        LighterPlan(words, peaks_of(of, other))
                        for words, of, other in lighter_stages(predictor, layout)
                    ),
                )
                recutter = partial(recut, predictor.job, layout)
            except ConfigurationError as error:
                chosen = str(error)
        received: ChosenLayout | str = broadcast_value(chosen, 0, device)
        if isinstance(received, str):
            raise ConfigurationError(received)
        return replace(received, recut=recutter)


def _in_first_steps(job: Job, schedule: Schedule, saves_memory: bool = True) -> Predictor:
    """Return a predictor of steps with another schedule, in which activations are computed again to save memory."""
    checkpointing = "always" if saves_memory else job.activation_checkpointing
    return Predictor(replace(job, schedule=schedule, activation_checkpointing=checkpointing))


def _fits_first_steps(job: Job, layout: Layout, schedule: Schedule) -> bool:
    """Whether the memory suffices for the first steps."""
    first = _in_first_steps(job, schedule)
    return not job.excess(first.device_memory(layout, job.run_ahead or False))


def _reason(job: Job, layout: Layout) -> str | None:
    """Return why activations are computed again; None if memory is not limited."""
    if not job.is_limited:
        return None
    stored = Predictor(replace(job, activation_checkpointing="never"))
    memory = stored.device_memory(layout, job.run_ahead or False)
    device = job.tightest(memory)
    needed, limit = format_bytes(memory[device]), format_bytes(job.limits[device])
    return f"a device with stored activations would need {needed}, and the limit is {limit}"


def _loaded_samples(trainer: Trainer) -> int | None:
    """Samples of a batch of one process: as the data module says, or else the loader that is to be trained on."""
    datamodule = getattr(trainer, "datamodule", None)
    size = samples_of(None, datamodule)
    if size is None and trainer.state.fn == TrainerFn.FITTING:
        size = samples_of(train_loader(trainer), None)
    return size
