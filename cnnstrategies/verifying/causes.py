"""The likely cause of a difference between two runs, by the first value that differs, and what the user can try."""

from cnnstrategies.verifying.first_difference import FirstDifference, TraceComparison
from cnnstrategies.verifying.tracer import Trace

DRAW = (
    "a random draw: {name} ({kind}) draws random numbers, and each process draws different ones; turn it off for the "
    "comparison, or draw in the data loader"
)
STATISTICS = (
    "a statistic of one process: {name} ({kind}) normalises with the samples of its process; use SyncBatchNorm "
    "(trainer.sync_batchnorm), GroupNorm, or its running statistics"
)
BUFFER = (
    "a buffer that differs between processes: {name} is updated on each process from its own samples, or was set on "
    "one process only; set it on all processes, or update it from values that all processes have"
)
UPDATED_BUFFER = (
    "a statistic of one process: the buffer {name} is updated from the samples of one process, and one device updates "
    "it from all samples"
)
HOOK = "a hook: {hooks} of {name} changes its values; a hook must treat each sample apart from the others"
SAMPLES = (
    "{name} ({kind}) computes its output for a sample from other samples too, or from a value that differs between the "
    "processes, such as a mask or a rank; compute it from the sample alone, or gather what it needs"
)
CODE = (
    "code {place}, which mixes samples (as a mask or a mean over the batch does), or uses a value that differs between "
    "the processes; compute it from the sample alone, or gather what it needs"
)
LOSS = (
    "the loss: the mean of the processes' losses is not the loss of all samples (as with ignored pixels, class "
    "weights, pairs); see the page on unequal devices for losses that are weighted correctly"
)
BACKWARD = (
    "the backward pass of the code or hooks after {name}: gradients of its output depend on other samples, or a tensor "
    "hook changes them"
)
UNCOMBINED = (
    "a gradient that is not combined: the processes have different gradients of {name} and equal ones of other "
    "parameters; let it require gradients before the run starts, and reach it by the module's forward only"
)
PARAMETER_HOOK = (
    "a hook of the parameter {name} or of a tensor, or a hook between backward and the optimizer's step, such as "
    "on_after_backward: it is not linear in the gradient, or runs on some processes only"
)
START = "other weights at the start on rank {rank}: a seed, or code that sets weights on one process only"
CLIPPED = (
    "gradient clipping, or on_before_optimizer_step{some}: the gradient of {name} agrees after the backward pass, and "
    "not in the optimizer's step; clip with trainer.gradient_clip_val"
)
UPDATE = (
    "the optimizer's step or gradient clipping{some}: gradients agree, and {name} does not agree after the step; look "
    "at settings that depend on the process, such as the learning rate, and at what the strategy itself does "
    "differently"
)


def likely_cause(difference: FirstDifference, comparison: TraceComparison) -> str:
    """Return the likely cause of a difference and what to try, as a text for the user.

    Args:
        difference: The first value that differs.
        comparison: The comparison that has found the difference.
    """
    trace = comparison.reference
    name = difference.name
    some = f" on rank {difference.ranks[0]} only" if difference.agreeing else ""
    match difference.kind:
        case "output" | "input":
            return _cause_in_forward(difference, trace)
        case "weight" if difference.step == 1:
            return START.format(rank=difference.ranks[0])
        case "weight" if comparison.is_not_combined(difference.step - 1, name):
            return UNCOMBINED.format(name=name)
        case "weight":
            return UPDATE.format(name=name, some=some)
        case "buffer":
            return (BUFFER if difference.agreeing else UPDATED_BUFFER).format(name=name)
        case "gradient":
            return BACKWARD.format(name=name)
        case "final gradient":
            return CLIPPED.format(name=name, some=some)
    return LOSS if comparison.loss_differs(difference.step) else PARAMETER_HOOK.format(name=name)


def _cause_in_forward(difference: FirstDifference, trace: Trace) -> str:
    name, previous = difference.name, difference.previous
    inside = [other for other in trace.modules if other.startswith(f"{name}.")]
    kind = trace.modules[name].kind
    if difference.kind == "output":
        if drawing := [other for other in [*inside, name] if other in trace.drawing]:
            return DRAW.format(name=drawing[0], kind=trace.modules[drawing[0]].kind)
        if trace.modules[name].has_batch_statistics:
            return STATISTICS.format(name=name, kind=kind)
        if not inside:
            return SAMPLES.format(name=name, kind=kind)
    # A hook of a module changes the module's output after it was recorded.
    hooked = next((other for other in (previous, name) if other and trace.modules[other].hooks), None)
    if hooked is not None:
        return HOOK.format(name=hooked, hooks=", ".join(trace.modules[hooked].hooks))
    return CODE.format(place=f"between {previous} and {name}" if previous else f"before {name}")
