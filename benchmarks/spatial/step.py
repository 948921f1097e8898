"""Measure a training step with divided images beside DistributedDataParallel, with the same global batch.

    python benchmarks/spatial/step.py [--seconds 1500]

Each variant has two processes of its own with gloo. In each round each variant makes one step, in a random order.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from pieces import Pieces, parser
from ranks import report, run_contest

from cnnstrategies.networks import UNet
from cnnstrategies.spatial import GroupLink, SpatialParts

CLASSES, RANKS, GOAL = 4, 2, 1.10
Step = Callable[[], None]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "U-Net": (partial(UNet, CLASSES, widths=(32, 64, 128, 256, 512)), True),
    "ResNet-50": (partial(resnet50, num_classes=CLASSES), False),
}
# Network, height and width of the images, and number of rounds.
CASES = {
    "ResNet-50 at 512": ("ResNet-50", 512, 5),
    "U-Net at 512": ("U-Net", 512, 4),
    "ResNet-50 at 1024": ("ResNet-50", 1024, 3),
    "U-Net at 1024": ("U-Net", 1024, 3),
}
ALONE = {f"{case}, without messages": case for case in ("ResNet-50 at 512", "U-Net at 512")}
TEXT = """
A step is forward, loss and backward in float32, with the sums of gradients, for a global batch of two images on two
processes: one whole image for each process under DistributedDataParallel (DDP), and half of the rows of both images
for each process with divided images. The U-Net is the package's, with 32 to 512 channels, and the ResNet-50 is
torchvision's.

- *Processor*: seconds of processor time of both processes in a step, with the threads of gloo; the median of the
  rounds. Its ratio is the median of the ratios of the rounds, with the smallest and the largest one. It depends little
  on other work on the machine.
- *Wall*: seconds from a barrier before the step to one after it. On a machine with other work the ratio of single
  rounds varies much.

{verdict}

## What limits a step

In one process, with a connection that sends nothing, a step with half of the rows of two images of 512 x 512 takes
{alone} of the processor time of a step with one whole image. So the rules for divided tensors are only a part of the
excess of ResNet-50. It has 53 batch norms, and each is a sum over the processes in the forward and another one in the
backward, for which the processes wait; 52 exchanges of rows are added. The threads of gloo took 0.19 s of processor
time in each process in a step of ResNet-50, and 0.05 s under DDP. At 1024 the network itself takes four times as long,
and the messages do not.

Tried for ResNet-50:

- The gradients of weights are summed in messages of 8 MiB while the backward goes on, and not layer by layer: 10 sums
  in place of 53, with one copy of the gradients less. The effect on the processor time is smaller than the noise.
- The gradient of batch norm is computed by torch's own operation for batch norm, which takes half as long as products
  of tensors of two shapes. Convolutions with large weights copy their few rows together with those of the neighbour,
  because a convolution of the edges alone reads the weights again. Convolutions of 1 x 1 with stride 2 need no copy of
  rows. In one process, 1.14 became 1.08 to 1.13.
- Sums of few numbers by one exchange and an addition on each process, in place of gloo's all-reduce. By itself such a
  sum is faster (0.15 in place of 1.1 ms), but a step at 512 is not: in two alternating runs each, the ratio was 1.32
  and 1.28 in place of 1.24 and 1.27. It was left out.
- Left: about 350 operations with a rule in Python, and the sums of gradients at skips, for which autograd takes new
  memory if tensors are divided.
"""


def batch(network: str, size: int) -> tuple[nn.Module, Tensor, Tensor, bool]:
    """Return the network, a batch of one image for each rank, the targets, and whether the targets are maps."""
    torch.manual_seed(0)
    make, has_maps = NETWORKS[network]
    images = torch.randn(RANKS, 3, size, size)
    return make(), images, torch.randint(CLASSES, (RANKS, size, size) if has_maps else (RANKS,)), has_maps


def whole_images(network: str, size: int, rank: int) -> Step:
    """Return a step in which each rank has one image."""
    module, images, targets, _ = batch(network, size)
    replica = DistributedDataParallel(module)
    images, targets = images[rank : rank + 1], targets[rank : rank + 1]

    def step() -> None:
        replica.zero_grad(set_to_none=True)
        F.cross_entropy(replica(images), targets).backward()

    return step


def divided_images(network: str, size: int, rank: int) -> Step:
    """Return a step in which each rank has half of the rows of two images."""
    module, images, targets, has_maps = batch(network, size)
    group = dist.group.WORLD
    assert group is not None
    parts = SpatialParts(GroupLink(group))
    assert parts.rank == rank
    images = parts.scatter(images, -2)
    targets = parts.scatter(targets, -2) if has_maps else targets

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with parts:
            F.cross_entropy(module(images), targets).backward()

    return step


class _SilentLink:
    """A connection that sends nothing, so that one process can run the part of one rank."""

    rank, count = 0, RANKS

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Step:
        return lambda: None

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        return tensor.clone()

    def begin_sum(self, tensor: Tensor) -> Step:
        return lambda: None


def measured_alone(case: str) -> list[list[float]]:
    """Return the processor times of steps with one whole image, and of steps with half of two images, in turn."""
    network, size, rounds = CASES[case]
    module, images, targets, has_maps = batch(network, size)
    parts = SpatialParts(_SilentLink())
    rows = parts.scatter(images, -2), parts.scatter(targets, -2) if has_maps else targets
    times: list[list[float]] = [[], []]
    torch.set_num_threads(1)
    for _ in range(1 + rounds):
        for seconds, (inputs, labels) in zip(times, ((images[:1], targets[:1]), rows), strict=True):
            module.zero_grad(set_to_none=True)
            start = time.process_time()
            with parts:
                F.cross_entropy(module(inputs), labels).backward()
            seconds.append(time.process_time() - start)
    return [seconds[1:] for seconds in times]


def ratio_with_spread(whole: Sequence[float], divided: Sequence[float]) -> tuple[float, str]:
    """Return the median of the rounds' ratios, and a text with the smallest and the largest one."""
    ratios = [part / image for image, part in zip(whole, divided, strict=True)]
    median = statistics.median(ratios)
    return median, f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def measured(case: str) -> list[list[list[float]]]:
    """Return seconds of wall time and of processor time: for each variant, the times of each round."""
    network, size, rounds = CASES[case]
    contestants = [partial(make, network, size) for make in (whole_images, divided_images)]
    results = run_contest(RANKS, contestants, rounds)
    walls = [[max(times) for times in zip(*(times for times, _, _ in ranks), strict=True)] for ranks in results]
    works = [[sum(times) for times in zip(*(times for _, times, _ in ranks), strict=True)] for ranks in results]
    return [*works, *walls]


def main() -> None:
    """Measure what is missing, and write the page of what is known."""
    pieces = Pieces(parser(__doc__).parse_args())
    pieces.measure(list(CASES), measured)
    pieces.measure(list(ALONE), lambda name: measured_alone(ALONE[name]))
    alone = [f"{ratio_with_spread(*pieces.known[name])[1]} ({ALONE[name]})" for name in ALONE if name in pieces.known]
    lines, successes = [], []
    known = [case for case in CASES if case in pieces.known]
    for case in known:
        *works, whole, divided = pieces.known[case]
        ratio, text = ratio_with_spread(*works)
        seconds = [f"{statistics.median(times):.2f}" for times in (*works, whole, divided)]
        network, size, _ = CASES[case]
        lines.append([network, f"{size}", *seconds[:2], text, *seconds[2:], ratio_with_spread(whole, divided)[1]])
        if ratio <= GOAL:
            successes.append(case)
    missing = [case for case in CASES if case not in known]
    verdict = (
        f"The goal is a processor time of at most {GOAL:.2f} of DDP's. "
        f"It is met for {', '.join(successes) if successes else 'none'} of {len(known)} cases."
        + "".join(f" {case} is not measured yet." for case in missing)
    )
    heading = [
        *("network", "size", "processor DDP", "divided", "ratio (rounds)"),
        *("wall DDP", "divided", "ratio (rounds)"),
    ]
    report(
        Path(__file__).with_suffix(".md"),
        "A step with divided images beside DDP",
        TEXT.format(verdict=verdict, alone=" and ".join(alone)),
        [heading, *lines],
    )


if __name__ == "__main__":
    main()
