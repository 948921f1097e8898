"""Show a plan as a table and in plain words."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cnnstrategies.planning.plan import Plan


def plan_table(plan: Plan) -> Group:
    """The stages as a table, then the predicted step and how it compares with data parallel.

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
    return Group(table, Text(f"{names}\n\n{summary(plan)}\n{verdict(plan)}"))


def summary(plan: Plan) -> str:
    """One sentence on the predicted step."""
    request = plan.request
    return (
        f"Predicted step: {plan.step_time * 1e3:.1f} ms for {plan.samples} samples ({plan.samples_per_second:.0f} "
        f"samples/s) on {plan.layout.devices} devices, {request.schedule} with {request.microbatches} microbatches; "
        f"{format_bytes(plan.sent_bytes)} sent per step. In the table times and sends are those of one "
        "microbatch; memory and busy are those of one device."
    )


def verdict(plan: Plan) -> str:
    """One sentence on data parallel with the same devices and the same batch."""
    other = plan.data_parallel
    ratio = other.step_time / plan.step_time
    cost = (
        f"{other.step_time * 1e3:.1f} ms, {format_bytes(other.sent_bytes)} sent, {format_bytes(other.memory)} a device"
    )
    limit = plan.request.memory_limit
    if len(plan.layout.replicas) == 1:
        return f"This is data parallel: strategy ddp does the same ({cost})."
    if limit is not None and other.memory > limit:
        return f"Data parallel does not fit into memory_limit={format_bytes(limit)} ({cost})."
    if ratio < 1:
        return f"Data parallel would be faster: {1 / ratio:.2f} times as fast ({cost}). Use strategy ddp."
    return f"Data parallel would be slower: {ratio:.2f} times the step time ({cost})."


def format_bytes(size: float) -> str:
    """A size with a unit, in 8 characters at most up to a terabyte: 1.5 MiB, 224 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if size < 10 else f"{size:.0f} GiB"
