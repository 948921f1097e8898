"""Measure the memory of each rank for a step with divided images, beside one process.

    python benchmarks/spatial/memory.py [--size 512] [--small 192]

The ranks are processes with gloo. An allocator counts the bytes of all tensors; it needs a C++ compiler.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models import resnet50

FOLDERS = "benchmarks/pipeline", "benchmarks/planning", "docs/examples"
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in FOLDERS]

from counted import Counted, build  # noqa: E402
from ranks import report, run_ranks  # noqa: E402
from volumes import UNet3D  # noqa: E402

from cnnstrategies.networks import UNet  # noqa: E402
from cnnstrategies.pipeline.tracing import trace_open  # noqa: E402
from cnnstrategies.planning.measure_parts import SAMPLES, part_costs  # noqa: E402
from cnnstrategies.spatial import GroupLink, RowsTensor, SpatialParts  # noqa: E402
from cnnstrategies.spatial.layout import Bounds  # noqa: E402

CLASSES = 4


class Network(NamedTuple):
    """A network, with the shape of its images.

    Attributes:
        make: Function that makes the network.
        has_maps: Whether each pixel has a class.
        shape: (C, ...) of an image; () for colour images of the size that the command names.
        classes: Number of classes.
    """

    make: Callable[[], nn.Module]
    has_maps: bool
    shape: tuple[int, ...] = ()
    classes: int = CLASSES


NETWORKS = {
    "U-Net": Network(partial(UNet, CLASSES, widths=(32, 64, 128, 256, 512)), True),
    "ResNet-50": Network(partial(resnet50, num_classes=CLASSES), False),
}
RECIPES = {
    "recipe, 1024 x 1024": Network(partial(UNet, CLASSES, widths=(8, 16, 32, 64, 128)), True, (3, 1024, 1024)),
    "recipe, 128 x 128 x 128": Network(partial(UNet3D, 3, (8, 16, 32, 64)), True, (1, 128, 128, 128), 3),
}
COUNTS = (2, 3)
MB = 1e6
SHARE_OF_LIMIT = 0.7  # A limit on a process's memory, as a share of what one process needs.
TEXT = """
A training step (forward, loss, backward) in float32 with one image of {size} x {size} pixels, whose rows are divided
over processes with gloo. The U-Net is the package's, with 32 to 512 channels, and the ResNet-50 is torchvision's. The
last rows are those of the [recipes](../../docs/recipes.md#large-images-and-volumes) for tiles and volumes.

- *Kept*: bytes of the tensors that the network keeps for its backward, apart from parameters. Tensors that share
  memory count once.
- *Peak*: the most bytes of tensors at any time of the step, apart from the network and the image, with the gradients
  of parameters and with messages. An allocator that takes the place of torch's counts them, with the workspaces of
  oneDNN and without the buffers of gloo.
- *Messages*: the most bytes that a rank sends and receives in one exchange of rows. They exist until the layer has
  been computed.
- *Copies*: bytes of the largest copy of rows together with rows of other ranks. Most convolutions need no copy: they
  convolve a rank's own rows, and then the rows at the edges.

Each rank has the gradients of all parameters, and those of the last layers exist together with most activations. The
peak's share can therefore be larger than that of the kept tensors.

{limits}

`plan` predicts the shares of kept tensors from a run on the meta device. For two images of {small} x {small} pixels the
largest difference between a rank's real and predicted share is {deviation:g}.
"""


@dataclass
class StepMemory:
    """Memory of one rank in one step, in bytes.

    Attributes:
        kept: Tensors that the network keeps for its backward, apart from parameters.
        peak: The most bytes of tensors, apart from the network and the image.
        total: The most bytes of tensors in this process.
        messages: The most bytes of messages in one exchange.
        copies: The largest copy of rows together with rows of other ranks.
    """

    kept: int
    peak: int
    total: int
    messages: int
    copies: int


class _NotingLink:
    """A connection that notes the largest exchange."""

    def __init__(self, link: GroupLink) -> None:
        self._link, self.rank, self.count = link, link.rank, link.count
        self.most = 0

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        self.most = max(self.most, sum(tensor.nbytes for tensor in (*sends.values(), *receives.values())))
        return self._link.exchange(sends, receives)

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        return self._link.reduce(tensor, operation)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        return self._link.begin_sum(tensor)


class _NotingParts(SpatialParts):
    """The rules for divided tensors, which note the largest copy of rows."""

    def __init__(self, link: _NotingLink) -> None:
        super().__init__(link)
        self.link, self.most = link, 0

    def fetch(self, rows: Tensor, axis: int, held: Bounds, wanted: Bounds, fill: float = 0) -> Tensor:
        window = super().fetch(rows, axis, held, wanted, fill)
        if window.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            self.most = max(self.most, window.nbytes)
        return window


def measured(rank: int, network: str, size: int, library: Path, limit: int = 0, samples: int = 1) -> StepMemory | None:
    """Train one step on this rank; None if the step needs more bytes than the limit, which is 0 for no limit."""
    counter = Counted(library)
    torch.manual_seed(0)
    make, has_maps, shape, classes = (NETWORKS | RECIPES)[network]
    module = make()
    channels, *sizes = shape or (3, size, size)
    images = torch.randn(samples, channels, *sizes)
    targets = torch.randint(classes, (samples, *sizes) if has_maps else (samples,))
    group = dist.group.WORLD
    assert group is not None
    parts = _NotingParts(_NotingLink(GroupLink(group)))
    if parts.count > 1:
        images = parts.scatter(images, 2)
        targets = parts.scatter(targets, 1) if has_maps else targets
    parameters = {parameter.data_ptr() for parameter in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = (tensor.rows if isinstance(tensor, RowsTensor) else tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = counter.now
    counter.forget()
    counter.limit(limit)
    try:
        with parts:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                scores = module(images)
            F.cross_entropy(scores, targets).backward()
    except torch.OutOfMemoryError:
        return None
    finally:
        counter.limit(0)
    total = counter.most
    return StepMemory(sum(kept.values()), total - before, total, parts.link.most, parts.most)


def rows_of_table(network: str, whole: StepMemory, ranks: list[StepMemory]) -> list[list[str]]:
    """Return a line for each rank."""
    return [
        [
            network, f"{len(ranks)}", f"{place}",
            f"{memory.kept / MB:,.1f}", f"{memory.kept / whole.kept:.3f}",
            f"{memory.peak / MB:,.1f}", f"{memory.peak / whole.peak:.3f}",
            f"{memory.messages / MB:.2f}", f"{memory.copies / MB:.2f}",
        ]
        for place, memory in enumerate(ranks)
    ]  # fmt: skip


def deviation(network: str, size: int, library: Path) -> float:
    """Return the largest difference of a rank's real and predicted share of the kept tensors."""
    (whole,) = run_ranks(1, measured, network, size, library, 0, SAMPLES)
    differences = []
    for count in COUNTS:
        ranks = run_ranks(count, measured, network, size, library, 0, SAMPLES)
        traced = trace_open(NETWORKS[network].make(), True)
        predicted = part_costs(traced, torch.zeros(1, 3, size, size), count, -2).shares
        differences += [abs(memory.kept / whole.kept - share) for memory, share in zip(ranks, predicted, strict=True)]
    return max(differences)


def limited(network: str, size: int, library: Path, whole: StepMemory) -> str:
    """Return a sentence about steps under a limit that is too small for one process."""
    limit = int(SHARE_OF_LIMIT * whole.total)
    ends = [
        "ends" if all(run_ranks(count, measured, network, size, library, limit))
        else "stops with torch.OutOfMemoryError"
        for count in (1, 2)
    ]  # fmt: skip
    return (
        f"With at most {limit / MB:,.0f} MB of tensors in each process, with those of the network, a step of the "
        f"{network} {ends[0]} on one process, and {ends[1]} on two."
    )


def main() -> None:
    """Measure the networks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--small", type=int, default=192)
    options = parser.parse_args()
    heading = ["network", "parts", "rank", "kept MB", "share", "peak MB", "share", "messages MB", "copies MB"]
    table, limits = [heading], []
    with TemporaryDirectory() as folder:
        library = build(Path(folder))
        for network in (*NETWORKS, *RECIPES):
            (whole,) = run_ranks(1, measured, network, options.size, library)
            table += rows_of_table(network, whole, [whole])
            for count in COUNTS:
                table += rows_of_table(network, whole, run_ranks(count, measured, network, options.size, library))
            if network in NETWORKS:
                limits.append(limited(network, options.size, library, whole))
        most = max(deviation(network, options.small, library) for network in NETWORKS)
    text = TEXT.format(size=options.size, small=options.small, deviation=most, limits=" ".join(limits))
    report(Path(__file__).with_suffix(".md"), "Memory of divided images", text, table)


if __name__ == "__main__":
    main()
