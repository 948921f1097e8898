"""Show a plan as a table and in plain words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Candidate, Job
from cnnstrategies.planning.costs import format_bytes
from cnnstrategies.planning.hybrid import Hybrid
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.rank import Ranking
from cnnstrategies.planning.stage_costs import StageCost, messages, sent_in_a_step, stage_costs
from cnnstrategies.planning.tune.settings import write_commented

COLUMNS = ("ms/step", "samples/s", "limit", "memory", "sent", "cost")
HYBRID = "cnnstrategies.strategies.HybridPipelineStrategy"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        sent_bytes: Activations that it sends on for one microbatch.
        memory: Bytes that each of its devices holds at most.
        busy: Share of the step that each of its devices computes.
    """

    first: str
    last: str
    replicas: int
    cost: StageCost
    sent_bytes: int
    memory: int
    busy: float


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step.

    Attributes:
        step_time: Seconds of forward, backward, transfers and reduction; without the optimizer's update.
        sent_bytes: Bytes that all devices together send in a step.
    """

    layout: Layout
    job: Job
    stages: tuple[StagePlan, ...]
    step_time: float
    samples: float
    sent_bytes: int
    spans: tuple[Span, ...]

    @property
    def samples_per_second(self) -> float:
        """Predicted throughput."""
        return self.samples / self.step_time


def describe(predictor: Predictor, layout: Layout) -> Plan:
    """What a layout's stages cost, and its step."""
    costs, microbatches = predictor.costs, predictor.problem.microbatches
    run_ahead = predictor.runs_ahead(layout)
    simulation = predictor.simulate(layout, run_ahead)
    stages = stage_costs(costs, layout.cuts)
    passing = messages(costs, layout.cuts)
    memory = predictor.stage_memory(layout, run_ahead)
    computing = [0.0] * len(stages)
    for span in simulation.spans:
        if span.kind in ("forward", "backward"):
            computing[span.stage] += span.end - span.start
    plans = tuple(
        StagePlan(
            first=costs.nodes[start].name,
            last=costs.nodes[end - 1].name,
            replicas=replicas,
            cost=stages[index],
            sent_bytes=sum(message.bytes for (source, _), message in passing.items() if source == index),
            memory=memory[index],
            busy=computing[index] / replicas / simulation.step_time,
        )
        for index, (start, end, replicas) in enumerate(predictor.problem.stages(layout))
    )
    return Plan(
        layout=layout,
        job=predictor.job,
        stages=plans,
        step_time=simulation.step_time,
        samples=costs.microbatch_size * microbatches,
        sent_bytes=sent_in_a_step(costs, layout, microbatches),
        spans=tuple(simulation.spans),
    )


def ranking_table(ranking: Ranking, samples_per_epoch: int | None) -> Group:
    """The strategies as a table, then what is to be said of them.

    Args:
        samples_per_epoch: Of the data; costs are those of a million samples where it is not known.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("strategy", no_wrap=True)
    priced = any(host.price for host in ranking.job.cluster.hosts)
    columns = [name for name in COLUMNS if priced or name != "cost"]
    for name in columns:
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    scale = 1.0 if samples_per_epoch is None else samples_per_epoch / 1e6

    def add(rows: Sequence[Candidate]) -> None:
        for row in rows:
            shown = {
                "ms/step": f"{row.step * 1e3:.4g}",
                "samples/s": f"{row.rate:.0f}",
                "limit": row.bottleneck,
                "memory": _short(row.memory),
                "sent": _short(row.sent_bytes),
                "cost": f"{ranking.price(row) * scale:.2f}",
            }
            table.add_row(str(row), *(shown[name] for name in columns))

    add(ranking.same)
    if ranking.changing:
        table.add_section()
        table.add_row("changes learning:")
        add(ranking.changing)
    lines = [f"- {note}" for note in ranking.notes]
    if priced:
        of = "a million samples" if samples_per_epoch is None else f"an epoch of {samples_per_epoch} samples"
        lines.insert(0, f"- cost: of {of}")
    return Group(table, Text("\n".join(lines)))


def _short(size: float) -> str:
    """With a letter for the unit, for a narrow column."""
    return format_bytes(size).replace(" ", "").replace("iB", "")


def stages_table(plan: Plan) -> Group:
    """The stages as a table, then the predicted step."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("stage", "replicas", "nodes", "forward\nms", "backward\nms", "params", "sends", "memory", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            str(stage.replicas),
            str(stage.cost.nodes),
            f"{stage.cost.forward * 1e3:.2f}",
            f"{stage.cost.backward * 1e3:.2f}",
            format_bytes(stage.cost.parameter_bytes),
            format_bytes(stage.sent_bytes),
            format_bytes(stage.memory),
            f"{stage.busy:.0%}",
        )
    names = "\n".join(f"stage {index}: {stage.first} to {stage.last}" for index, stage in enumerate(plan.stages))
    return Group(table, Text(f"{names}\n\n{summary(plan)}"))


def summary(plan: Plan) -> str:
    """One sentence on the predicted step."""
    return (
        f"Predicted step: {plan.step_time * 1e3:.1f} ms for {plan.samples:.0f} samples ({plan.samples_per_second:.0f} "
        f"samples/s) on {plan.layout.devices} devices, {plan.job.schedule} with {plan.job.microbatches} microbatches; "
        f"{format_bytes(plan.sent_bytes)} sent per step. In the table times and sends are those of one microbatch; "
        "memory and busy are those of one device."
    )


def write_overlay(file: Path, ranking: Ranking) -> None:
    """Write the best strategy as what ``fit`` takes after the configuration that was planned for."""
    job, row = ranking.job, ranking.best
    lines = [
        f"{row}: {row.step * 1e3:.4g} ms a step predicted, {row.rate:.4g} samples/s",
        "  cnnstrategies fit --config YOURS --config THIS",
    ]
    trainer: dict[str, Any] = {}
    counts = {host.devices for host in job.cluster.hosts}
    if len(counts) == 1:
        trainer |= {"num_nodes": len(job.cluster.hosts), "devices": min(counts)}
    options = dict(row.options)
    trainer["accumulate_grad_batches"] = options.pop("accumulate_grad_batches", 1)
    if isinstance(row, Hybrid):
        if job.profile.nodes_have_names:
            options["cuts"] = [row.predictor.costs.nodes[cut - 1].name for cut in row.layout.cuts]
        else:
            lines.append("The profile's nodes are not those that fit knows: it chooses the cuts by its own profile.")
        options |= {"schedule": job.schedule, "activation_checkpointing": job.activation_checkpointing}
        trainer["strategy"] = {"class_path": HYBRID, "init_args": options}
    else:
        trainer["strategy"] = row.family
    written: dict[str, Any] = {"trainer": trainer}
    if row.samples != job.samples:
        written["data"] = {"init_args": {"global_batch_size": row.samples}}
    write_commented(file, written, lines)
