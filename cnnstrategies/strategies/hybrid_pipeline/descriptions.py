"""Texts about a pipeline for users: rows of the start panel, differences from one device, and warnings."""

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import fx, nn

from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.stage import StageGraph, copy_value
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.shares.dealing import NORMALISED_TOGETHER, deal
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest

OWN_DRAWS = "random draws of the network (as in dropout) are each microbatch's own"


def describe_pipeline(
    placement: Placement,
    graphs: Sequence[StageGraph],
    parameters: Sequence[int],
    request: LayoutRequest,
    batch_size: int | None,
) -> list[tuple[str, str]]:
    """Return rows of the start panel: the microbatches of a step, and the modules, ranks and parameters of each stage.

    Args:
        placement: Numbering of the ranks, and the microbatches of each rank.
        graphs: Graphs of the stages.
        parameters: Number of parameters of each stage.
        request: The strategy's arguments.
        batch_size: Samples of a batch on each replica of the first stage; None if the number is not known.
    """
    images = _images(placement, batch_size)
    microbatches = str(placement.microbatches) if images is None else f"{placement.microbatches} of {images}"
    configured = " (as configured)" if request.microbatches is not None else ""
    rows = [("microbatches", f"{microbatches}{configured}")]
    if request.shares != "equal":
        measured = f"{request.initial_shares} at first, then by each rank's own time"
        shares = measured if request.shares == "auto" else f"{list(request.shares)}, rank by rank"
        rows.append(("shares", f"of the microbatches: {shares}"))
    for stage, (graph, number) in enumerate(zip(graphs, parameters, strict=True)):
        nodes = [node for node in graph.graph.nodes if _computes(node)]
        where = _ranks(placement.ranks(stage))
        first, last = _name(nodes[0]), _name(nodes[-1])
        span = first if first == last else f"{first} to {last}"
        rows.append((f"stage {stage}", f"{span} on {where}: {number:,} parameters"))
    if placement.replicas[-1] > 1:
        rows.append(("outputs", f"{_ranks(placement.ranks(placement.stages - 1))} each get those of the whole batch"))
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    together = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]} to {ranks[-1]}" if together else f"ranks {', '.join(map(str, ranks))}"


def differences(placed: PlacedNetwork, batch_size: int | None) -> list[str]:
    """Return one line of text for each difference from a run on one device.

    Args:
        placed: The divided network.
        batch_size: Number of samples of a batch on each replica of the first stage; None if the number is not known.
    """
    if placed.runner.microbatches == 1 or placed.one_microbatch is not None:
        return []
    return differences_of_pipeline(placed.division.network, placed.runner.placement, batch_size)


def warn_after_first_batch(placed: PlacedNetwork) -> None:
    """Warn if the first training batch was one microbatch, or if BatchNorm has few images in a microbatch."""
    if placed.one_microbatch is not None:
        rank_zero_warn(placed.one_microbatch)
    else:
        warn_of_small_microbatches(placed.division.network, placed.runner.sizes)


def differences_of_pipeline(network: nn.Module, placement: Placement, batch_size: int | None) -> list[str]:
    """Return one line of text for each difference from one device; see :func:`describe_pipeline`."""
    lines = []
    if has_batch_norm(network):
        images = _images(placement, batch_size)
        lines.append(f"BatchNorm normalises over each microbatch's {'own images' if images is None else images}")
    return [*lines, OWN_DRAWS]


def warn_of_small_microbatches(network: nn.Module, sizes: Sequence[int]) -> None:
    """Warn if batch normalisation has few images at a time.

    Args:
        network: The network.
        sizes: Number of images of each microbatch.
    """
    filled = [size for size in sizes if size]
    if filled and min(filled) < NORMALISED_TOGETHER and has_batch_norm(network):
        rank_zero_warn(
            f"BatchNorm normalises over {_range(filled)}: a batch of {sum(sizes)} is cut into "
            f"{len(sizes)} microbatches. With fewer than {NORMALISED_TOGETHER} its statistics are poor: lower "
            "microbatches or raise the batch size"
        )


def _images(placement: Placement, batch_size: int | None) -> str | None:
    if batch_size is None:
        return None
    rows = deal(batch_size * placement.replicas[0], placement.loads)
    split = Split(rows, placement.runs[0])
    return _range([size for size in split.sizes if size])


def _range(sizes: list[int]) -> str:
    if min(sizes) < max(sizes):
        return f"{min(sizes)} to {max(sizes)} images"
    return "1 image" if sizes[0] == 1 else f"{sizes[0]} images"


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and node.target is not copy_value


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
