"""Lines of output about lasting changes of the step time: the cause, its size and the remedy."""

from collections.abc import Sequence

from cnnstrategies.callbacks.slow_changes import CHECKPOINT, VALIDATION, SlowChange, StepsEnded
from cnnstrategies.strategies.protocol import StepKind

REMEDIES = {
    "compute": "stop other programs on its machine or device, and look at its temperature; if it stays slow, give it a "
    "smaller share of the work, for example with strategy ddp_balanced",
    "data": "use more loader workers (num_workers), stop what else reads from the disk, or pack images into shards "
    "(cnnstrategies pack)",
    "rest": "look at loggers, at batch hooks and at other code that runs between the steps",
    "waited": "test the links with cnnstrategies doctor, or send less, for example with strategy ddp_bf16",
    "servers": "a worker whose own work takes longer prints its own line; otherwise look at the load of the servers, "
    "and at the link to them",
    VALIDATION: "validate less often (check_val_every_n_epoch), or on fewer batches (limit_val_batches)",
    CHECKPOINT: "look at the load of the checkpoints' disk, or save less often",
    "beside": "call it less often, or remove it",
}
ALL_RANKS = "look for other programs, for a lower clock of the devices, and for larger inputs"


def line_about(change: SlowChange, kind: StepKind, me: str) -> str:
    """Return the line about a change that has begun.

    Args:
        change: The change.
        kind: What a process computes in a step.
        me: Name of this process, if the change is in the blocks of one rank.
    """
    if not change.in_each_step:
        action = {VALIDATION: "validation takes", CHECKPOINT: "saving a checkpoint takes"}.get(change.name)
        remedy = REMEDIES.get(change.name, REMEDIES["beside"])
        text = f"{action or f'{change.name} takes'} {milliseconds(change.after)} each time"
        return f"slow since step {change.first}: {text} ({milliseconds(change.before)} before): {remedy}"
    size = f"a step takes {milliseconds(change.step_after)} ({milliseconds(change.step_before)} before)"
    is_alone = change.world == 1 and kind != "worker"
    subject = _ranks(change.ranks, change.world, me)
    is_plural = 1 < len(change.ranks) < change.world
    times = f"{milliseconds(change.after)} ({milliseconds(change.before)} before)"
    remedy = REMEDIES[change.part]
    if change.part == "compute":
        text = f"the own work of {subject} takes {times}"
        remedy = ALL_RANKS if is_alone or len(change.ranks) == change.world > 1 else remedy
    elif change.part == "data":
        text = f"{subject} {'wait' if is_plural else 'waits'} {times} for the data loader"
    elif change.part == "rest":
        text = f"{subject} {'are' if is_plural else 'is'} busy between the steps for {times}"
    elif change.part == "waited" and kind == "worker":
        text, remedy = f"{subject} waits {times} for the servers", REMEDIES["servers"]
    elif change.part == "waited":
        text = f"no rank's own work takes longer, but the ranks wait {times} for messages"
    else:
        text = f"{change.name} takes {times} on {subject}"
    return f"slow since step {change.first}: {text}; {size}: {remedy}"


def line_about_end(end: StepsEnded) -> str:
    """Return the line about a change that has ended."""
    change = end.change
    if not change.in_each_step:
        now = f"it takes {milliseconds(end.now)} now" if end.now else "it does not run any more"
        name = {CHECKPOINT: "saving a checkpoint"}.get(change.name, change.name)
        return f"not slow any more since step {end.first}: {name}; {now} ({milliseconds(change.after)} before)"
    times = f"{milliseconds(end.now)} ({milliseconds(change.step_after)} before)"
    return f"not slow any more since step {end.first}: a step takes {times}"


def milliseconds(seconds: float) -> str:
    """Return a time as text, in seconds from one second on, otherwise in milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _ranks(ranks: Sequence[int], world: int, me: str) -> str:
    if world == 1:
        return me
    if len(ranks) == world:
        return "each rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
