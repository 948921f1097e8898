"""Accuracy with compression both ways on a made-up task of 20 epochs. Target: within half a point of no compression.

    python benchmarks/parameter_server/synthetic_accuracy.py

Each class is a coarse pattern; an image is the pattern of its class, shifted at random, under noise that is one and a
half times as strong. Mode sync: without compression its steps are DDP's. A server and all workers are in one process
and take turns: the same seed has the same task, first weights and batches in every row.
"""

import copy
import math
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fits  # noqa: F401  # First: it makes the pipeline's benchmarks importable.
import torch
import torch.nn.functional as F
from pieces import Pieces, parser
from ranks import report
from torch import Tensor, nn

from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS, EPOCHS, SEEDS, BATCH = 2, 20, 5, 64
CLASSES, SIZE, CELLS = 10, 16, 4
TRAINED, HELD_OUT = 1280, 2048
NOISE = 1.5
SHOWN = (5, 10, 20)  # epochs


def both(compression: str, **options: Any) -> dict[str, Any]:
    """Compressed in the same way both ways."""
    return {"compression": compression, "pull_compression": compression, **options}


VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": both("fp16"),
    "topk 5 %": both("topk", topk_density=0.05),
    "topk 1 %": both("topk", topk_density=0.01),
    "topk 5 %, pulls onebit": {**both("topk", topk_density=0.05), "pull_compression": "onebit"},
    "onebit": both("onebit"),
}


def task(seed: int) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 16, 16) and their classes."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randn(CLASSES, CELLS, CELLS, generator=generator)
    patterns = cells.repeat_interleave(SIZE // CELLS, 1).repeat_interleave(SIZE // CELLS, 2)
    targets = torch.randint(CLASSES, (TRAINED + HELD_OUT,), generator=generator)
    shifts = torch.randint(SIZE, (2, len(targets), 1, 1), generator=generator)
    rows, columns = ((torch.arange(SIZE) + shift).remainder(SIZE) for shift in shifts)
    images = patterns[targets[:, None, None], rows.transpose(1, 2), columns]
    noise = torch.randn(images.shape, generator=generator)
    return (images + NOISE * noise)[:, None] / (1 + NOISE**2) ** 0.5, targets


@contextmanager
def connected(specification: Specification, replicas: list[nn.Module]) -> Iterator[list[Worker]]:
    """A server in a thread, and a worker for each replica."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/server"
        members = tuple(WorkerInfo(number) for number in range(specification.workers))
        view = View(1, (ServerInfo(0, endpoint),), members)
        server = ServerService(specification, unchanging(view), 0, endpoint)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        workers = [
            Worker(specification, [p.data for p in replica.parameters()], unchanging(view), number)
            for number, replica in enumerate(replicas)
        ]
        workers[0].initialise()
        for worker in workers:
            worker.join()
        try:
            yield workers
        finally:
            server.stop()
            thread.join()
            for worker in workers:
                worker.close()


def train(
    replicas: list[nn.Module],
    options: dict[str, Any],
    data: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
) -> list[float]:
    """Train replicas, which take turns, by a learning rate that falls along a cosine.

    Args:
        replicas: With the same weights.
        options: Of the parameter server.
        data: Images and targets.
        held_out: The same, for validation.
        epochs: How many.
        seed: Of the batches.

    Returns:
        The accuracy after each epoch, in percent.
    """
    images, targets = data
    reached = []
    optimizer = torch.optim.SGD(replicas[0].parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)
    specification = Specification.of(replicas[0].named_parameters(), optimizer, len(replicas), **options)
    with connected(specification, replicas) as workers:
        for epoch in range(epochs):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / epochs))
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            for batch in order.split(BATCH):
                for part, replica, worker in zip(batch.chunk(len(replicas)), replicas, workers, strict=True):
                    replica.zero_grad()
                    loss = F.cross_entropy(replica(images[part]), targets[part], label_smoothing=0.05)
                    loss.backward()
                    worker.begin_step(hyperparameters(optimizer), len(part))
                    for index, parameter in enumerate(replica.parameters()):
                        assert parameter.grad is not None
                        worker.push(index, parameter.grad)
                    worker.end_step()
                for worker in workers:
                    worker.wait_all()
            reached.append(accuracy(copy.deepcopy(replicas), *held_out))
    return reached


@torch.no_grad()
def accuracy(replicas: list[nn.Module], images: Tensor, targets: Tensor) -> float:
    """In percent, with the mean of the replicas' running statistics."""
    network = replicas[0].eval()
    for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(buffers).mean(0))
    return 100 * float((network(images).argmax(1) == targets).float().mean())


def measure(name: str) -> list[float]:
    """The accuracy after each epoch."""
    variant, _, number = name.partition(": seed ")
    seed = int(number)
    images, targets = task(seed)
    torch.manual_seed(seed)
    replicas: list[nn.Module] = [SmallCNN(CLASSES, widths=[16, 32]) for _ in range(WORKERS)]
    data, held_out = ((images[part], targets[part]) for part in (slice(TRAINED), slice(TRAINED, None)))
    return train(replicas, VARIANTS[variant], data, held_out, EPOCHS, seed)


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    pieces = Pieces(options)
    names = {variant: [f"{variant}: seed {seed}" for seed in range(SEEDS)] for variant in VARIANTS}
    if not pieces.measure([name for each in zip(*names.values(), strict=True) for name in each], measure):
        return
    accuracies = {variant: [pieces.known[name] for name in each] for variant, each in names.items()}
    rows = [("both ways", *(f"after {epoch} epochs" for epoch in SHOWN), "difference at the end, in pairs")]
    for variant, each in accuracies.items():
        means = (f"{statistics.mean(reached[epoch - 1] for reached in each):.2f}" for epoch in SHOWN)
        pairs = [accuracy[-1] - other[-1] for accuracy, other in zip(each, accuracies["none"], strict=True)]
        difference = "" if variant == "none" else f"{statistics.mean(pairs):+.2f} ± {statistics.stdev(pairs):.2f}"
        rows.append((variant, *means, difference))
    report(
        Path(__file__).with_suffix(".md"),
        "Compressed both ways on a made-up task",
        f"{__doc__}\n{CLASSES} classes, {TRAINED} images of {SIZE} x {SIZE} for training and {HELD_OUT} for "
        f"validation, steps of {BATCH} images on {WORKERS} workers; SmallCNN, SGD with Nesterov's momentum of 0.9. "
        f"Validation accuracy in percent, means over {SEEDS} seeds, and the mean and standard deviation of the "
        "differences to no compression with the same seed.",
        rows,
        "one thread",
    )


if __name__ == "__main__":
    main()
