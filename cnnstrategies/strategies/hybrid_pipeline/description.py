"""A pipeline in words: its stages and microbatches, and what they do in another way than one device."""

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import fx, nn

from cnnstrategies.pipeline.buffers import BatchNormMode, has_batch_norm
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.microbatches import NORMALISED_TOGETHER, Split
from cnnstrategies.pipeline.stage import copy_value
from cnnstrategies.pipeline.timetable import Schedule
from cnnstrategies.strategies.differences import RANDOM_DRAWS


def describe_pipeline(
    pipeline: Pipeline, schedule: Schedule, configured: bool, batch_size: int | None
) -> list[tuple[str, str]]:
    """The microbatches of a step, and for each stage its first and last module, ranks and parameters.

    Args:
        pipeline: The pipeline.
        schedule: Its schedule.
        configured: Whether the user has named the number of microbatches.
        batch_size: Samples of a batch in each replica of the first stage; None where they are not known.
    """
    images = _images(pipeline, batch_size)
    microbatches = str(pipeline.microbatches) if images is None else f"{pipeline.microbatches} of {images}"
    rows = [("microbatches", f"{microbatches}{' (as configured)' if configured else ''}, schedule {schedule}")]
    for stage, parameters in enumerate(stage_parameters(pipeline)):
        nodes = [node for node in pipeline.blueprint.training.stages[stage].graph.nodes if _computes(node)]
        ranks = pipeline.placement.ranks(stage)
        together = ranks[-1] - ranks[0] == len(ranks) - 1
        where = f"ranks {ranks[0]} to {ranks[-1]}" if together else f"ranks {', '.join(map(str, ranks))}"
        where = f"rank {ranks[0]}" if len(ranks) == 1 else where
        text = f"{_name(nodes[0])} to {_name(nodes[-1])} on {where}: {parameters:,} parameters"
        rows.append((f"stage {stage}", text))
    return rows


def stage_parameters(pipeline: Pipeline) -> list[int]:
    """Number of parameters of each stage; known on every rank, though it holds those of its own stage alone."""
    names = {name for name, _ in pipeline.blueprint.network.named_parameters()}
    return [sum(pipeline.shapes[name].numel() for name in own if name in names) for own in pipeline.blueprint.state]


def differences_of_pipeline(pipeline: Pipeline, mode: BatchNormMode, batch_size: int | None) -> list[str]:
    """What is different from one device, one line each; see :func:`describe_pipeline`."""
    lines = []
    if has_batch_norm(pipeline.blueprint.network):
        images = _images(pipeline, batch_size)
        lines.append(f"BatchNorm normalises over each microbatch's {'own images' if images is None else images}")
        if mode == "microbatch":
            lines.append("BatchNorm's running statistics follow each microbatch")
    if _has_spectral_norm(pipeline.blueprint.network):
        lines.append("spectral norm makes a power iteration for each microbatch")
    return [*lines, RANDOM_DRAWS]


def warn_of_small_microbatches(network: nn.Module, split: Split) -> None:
    """Say it when batch normalisation has few images at a time."""
    sizes = [size for size in split.sizes if size]
    if sizes and min(sizes) < NORMALISED_TOGETHER and has_batch_norm(network):
        rank_zero_warn(
            f"BatchNorm normalises over {_range(sizes)}: a batch of {split.samples} is cut into "
            f"{split.microbatches} microbatches. With fewer than {NORMALISED_TOGETHER} its statistics are poor: lower "
            "microbatches or raise the batch size"
        )


def _has_spectral_norm(network: nn.Module) -> bool:
    """Whether it has the vectors of power iterations, which both of torch's spectral norms call the same."""
    names = {name for name, _ in network.named_buffers()}
    return any(name.endswith("_u") and f"{name[:-1]}v" in names for name in names)


def _images(pipeline: Pipeline, batch_size: int | None) -> str | None:
    if batch_size is None:
        return None
    split = Split((batch_size,) * pipeline.placement.replicas[0], pipeline.microbatches)
    return _range([size for size in split.sizes if size])


def _range(sizes: list[int]) -> str:
    if min(sizes) < max(sizes):
        return f"{min(sizes)} to {max(sizes)} images"
    return "1 image" if sizes[0] == 1 else f"{sizes[0]} images"


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and node.target is not copy_value


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
