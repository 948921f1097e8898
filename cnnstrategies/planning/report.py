"""Show a plan as tables with notes, and write it as a configuration."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Candidate
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.costs import digits, format_bytes
from cnnstrategies.planning.hybrid import Hybrid
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.rank import Ranking
from cnnstrategies.planning.recompute import CALLBACK, RECOMPUTED
from cnnstrategies.planning.simulate import Simulation
from cnnstrategies.planning.stage_costs import messages, stage_costs

COLUMNS = ("ms/step", "samples/s", "limit", "memory", "sent", "cost")
CLASSES = {
    "hybrid": "HybridPipelineStrategy",
    "ddp_balanced": "BalancedDDPStrategy",
    "parameter_server": "ParameterServerStrategy",
    "spatial": "SpatialStrategy",
}


def ranking_table(ranking: Ranking) -> Group:
    """Return a table of the strategies, followed by the notes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("strategy", no_wrap=True)
    priced = any(host.price for host in ranking.job.cluster.hosts)
    columns = [name for name in COLUMNS if priced or name != "cost"]
    for name in columns:
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)

    def add(rows: Sequence[Candidate]) -> None:
        for row in rows:
            shown = {
                "ms/step": digits(row.step * 1e3, 4),
                "samples/s": f"{ranking.rate(row):.0f}",
                "limit": row.bottleneck,
                "memory": _short(row.memory),
                "sent": _short(row.sent_bytes),
                "cost": f"{ranking.price(row):.2f}",
            }
            table.add_row(str(row), *(shown[name] for name in columns))

    add(ranking.same)
    if ranking.changing:
        table.add_section()
        table.add_row("changes learning:")
        add(ranking.changing)
    lines = [f"- {note}" for note in ranking.notes]
    if priced:
        lines.insert(0, "- cost: price of training a million samples")
    return Group(table, Text("\n".join(lines)))


def _short(size: float) -> str:
    """Return a size with a unit of one letter, such as 1.5M, for a narrow column."""
    return format_bytes(size).replace(" ", "").replace("iB", "")


def stages_table(predictor: Predictor, layout: Layout, step: Simulation) -> Group:
    """Return a table of the stages of a layout, followed by sentences about the predicted step."""
    costs, problem = predictor.costs, predictor.problem
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("stage", "replicas", "nodes", "forward\nms", "backward\nms", "params", "sends", "memory", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    peaks = predictor.stage_peaks(layout, predictor.runs_ahead(layout))
    passing = messages(costs, layout.cuts)
    computing = [0.0] * len(layout.replicas)
    for span in step.spans:
        if span.kind in ("forward", "backward"):
            computing[span.stage] += span.end - span.start
    names = []
    for index, (start, end, _, replicas, _) in enumerate(problem.sections(layout)):
        cost = stage_costs(costs, layout.cuts)[index]
        table.add_row(
            str(index),
            str(replicas),
            str(cost.nodes),
            f"{cost.forward * 1e3:.2f}",
            f"{cost.backward * 1e3:.2f}",
            format_bytes(cost.parameter_bytes),
            format_bytes(sum(message.bytes for (source, _), message in passing.items() if source == index)),
            format_bytes(peaks[index].total),
            f"{computing[index] / replicas / step.step_time:.0%}",
        )
        names.append(f"stage {index}: {costs.nodes[start].name} to {costs.nodes[end - 1].name}")
    sent = format_bytes(predictor.sent_bytes(layout))
    explanation = "In the table, times and sends are those of one microbatch; memory and busy are those of one device."
    return Group(
        table, Text("\n".join([*names, "", f"{summary(predictor, layout, step)}; {sent} sent per step. {explanation}"]))
    )


def summary(predictor: Predictor, layout: Layout, step: Simulation) -> str:
    """Return a sentence about the predicted step.

    The predicted time does not contain the optimizer's update.
    """
    job, microbatches = predictor.job, predictor.problem.microbatches
    samples = predictor.costs.microbatch_size * microbatches
    seconds = step.step_time + predictor.values_time(layout)
    again = f", activation_checkpointing: {job.activation_checkpointing}" if predictor.problem.recomputes else ""
    return (
        f"Predicted step: {seconds * 1e3:.1f} ms for {samples:.0f} samples ({samples / seconds:.0f} "
        f"samples/s) on {layout.devices} devices, {job.schedule} with {microbatches} "
        f"microbatches{again}"
    )


def write_overlay(file: Path, ranking: Ranking) -> None:
    """Write a file that configures the best strategy for ``fit``.

    The user passes this file to ``fit`` after the configuration file for which the plan was made.
    """
    trainer, lines = trainer_section(ranking, ranking.best)
    write_commented(
        file, {"trainer": trainer}, [lines[0], "  cnnstrategies fit --config YOURS --config THIS", *lines[1:]]
    )


def trainer_section(ranking: Ranking, row: Candidate) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a configuration's section ``trainer`` for a candidate, and comments about the candidate.

    Returns:
        The keys with their values, and lines of comment. The first line names the candidate and its predicted speed.
    """
    job = ranking.job
    lines = [f"{row}: predicted {digits(row.step * 1e3, 4)} ms per step, {digits(ranking.rate(row), 4)} samples/s"]
    trainer: dict[str, Any] = {}
    counts = [host.devices for host in job.cluster.hosts]
    if len(set(counts)) == 1:
        trainer |= {"num_nodes": len(counts), "devices": counts[0]}
    else:
        lines.append(
            f"The machines have {', '.join(map(str, counts))} devices, but Lightning starts the same number of ranks "
            "on each machine: set trainer.num_nodes and trainer.devices yourself."
        )
    if job.precision is not None:
        trainer["precision"] = job.precision
    options = dict(row.options)
    trainer["accumulate_grad_batches"] = options.pop("accumulate_grad_batches", 1)
    if options.pop(RECOMPUTED, None) is not None:
        trainer["callbacks+"] = {"class_path": CALLBACK}
    if isinstance(row, Hybrid):
        if job.profile.nodes_have_names:
            options["cuts"] = [row.predictor.costs.nodes[cut - 1].name for cut in row.layout.cuts]
        else:
            lines.append(
                "fit does not know the node names of this profile, so it measures its own profile to choose the cuts."
            )
        limits = [int(limit) for limit in job.limits if limit < inf]
        if len(limits) == job.cluster.devices:
            # Without a limit, the first step would not save memory, and named cuts would run ahead.
            options["memory_limit"] = limits if len(set(limits)) > 1 else limits[0]
        if "shares" in options or isinstance(options.get("memory_limit"), list):
            # Shares and limits are listed stage by stage, so the ranks must be numbered stage by stage as well.
            options["placement"] = "stages"
        options |= {
            "schedule": job.schedule,
            "activation_checkpointing": row.predictor.job.activation_checkpointing,
        }
    if row.family in CLASSES and options:
        strategy = f"cnnstrategies.strategies.{CLASSES[row.family]}"
        trainer["strategy"] = {"class_path": strategy, "init_args": options}
    else:
        trainer["strategy"] = row.family
    return trainer, lines
