"""Show a plan as a table and in plain words."""

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cnnstrategies.planning.plan import Plan
from cnnstrategies.planning.rank import Ranking, Row
from cnnstrategies.planning.sizes import format_bytes

COLUMNS = ("ms/step", "samples/s", "limit", "memory", "sent", "goodput", "cost")


def ranking_table(ranking: Ranking, samples_per_epoch: int | None) -> Group:
    """The strategies as a table, then what is to be said of them.

    Args:
        ranking: The strategies, best first.
        samples_per_epoch: Of the data; costs are those of a million samples where it is not known.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("strategy", no_wrap=True)
    priced = any(host.price for host in ranking.job.cluster.hosts)
    failing = ranking.job.cluster.failures is not None
    columns = [name for name in COLUMNS if (priced or name != "cost") and (failing or name != "goodput")]
    for name in columns:
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    scale = 1.0 if samples_per_epoch is None else samples_per_epoch / 1e6

    def add(rows: Sequence[Row]) -> None:
        for row in rows:
            made = row.prediction
            shown = {
                "ms/step": f"{made.step * 1e3:.4g}",
                "samples/s": f"{made.rate:.0f}",
                "limit": made.bottleneck,
                "memory": _short(made.memory),
                "sent": _short(made.sent_bytes),
                "goodput": f"{made.goodput:.1%}",
                "cost": f"{row.price * scale:.2f}",
            }
            table.add_row(str(row.candidate), *(shown[name] for name in columns))

    add(ranking.same)
    if ranking.changing:
        table.add_section()
        table.add_row("changes learning:")
        add(ranking.changing)
    lines = [f"- {note}" for note in ranking.notes]
    if priced:
        of = "a million samples" if samples_per_epoch is None else f"an epoch of {samples_per_epoch} samples"
        lines.insert(0, f"- cost: of {of}, with what failures lose")
    return Group(table, Text("\n".join(lines)))


def _short(size: float) -> str:
    """With a letter for the unit, for a narrow column."""
    return format_bytes(size).replace(" ", "").replace("iB", "")


def stages_table(plan: Plan) -> Group:
    """The stages as a table, then the predicted step.

    Args:
        plan: The plan to show.

    Returns:
        Something that a rich console prints.
    """
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
    request = plan.request
    placed = ""
    if plan.placement == "replicas":
        placed = "; each pipeline has its stages on one machine as far as they fit (placement: replicas)"
    return (
        f"Predicted step: {plan.step_time * 1e3:.1f} ms for {plan.samples:.0f} samples ({plan.samples_per_second:.0f} "
        f"samples/s) on {plan.layout.devices} devices, {request.schedule} with {request.microbatches} microbatches; "
        f"{format_bytes(plan.sent_bytes)} sent per step{placed}. In the table times and sends are those of one "
        "microbatch; memory and busy are those of one device."
    )
