"""Accuracy on the digits with top-k of 1 % and momentum 0.9: as it is, and as Deep Gradient Compression has it.

    python benchmarks/parameter_server/dgc_accuracy.py

The quickstart's network, optimizer and schedule, mode sync. A server and all workers are in one process and take
turns: the same seed has the same first weights, images and batches in every row. A step has 64 images, whatever the
number of workers. Validation accuracy after the last epoch, in percent, and its standard deviation over the seeds.
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
import numpy as np
import torch
import torch.nn.functional as F
from pieces import Pieces, parser
from ranks import report
from torch import Tensor, nn

from cnnstrategies.data.digits import FILE
from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.file_views import FileViews
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS = (2, 4)
EPOCHS = {4: 1, 20: 4}  # of a run: those of its warm-up
STEPS, BATCH = 20, 64  # of an epoch, of a step
TRAINED = STEPS * BATCH  # images; the others are for validation
TOPK: dict[str, Any] = {"compression": "topk", "compression_ratio": 0.01}
CORRECTED = {"momentum_correction": True}
WARM_UP = "warm-up"
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": TOPK,
    f"topk, {WARM_UP}": TOPK,
    "topk, momentum correction": TOPK | CORRECTED,
    f"topk, momentum correction, {WARM_UP}": TOPK | CORRECTED,
    "onebit": {"compression": "onebit"},
}


@contextmanager
def connected(specification: Specification, replicas: list[nn.Module]) -> Iterator[list[Worker]]:
    """A server in a thread, and a worker for each replica."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint, views = f"ipc://{folder}/server", FileViews(Path(folder) / "view")
        members = tuple(WorkerInfo(number) for number in range(specification.workers))
        views.publish(View(1, (ServerInfo(0, endpoint),), members))
        server = ServerService(specification, FileViews(Path(folder) / "view"), 0, endpoint)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        workers = [
            Worker(specification, [p.data for p in replica.parameters()], FileViews(Path(folder) / "view"), number)
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


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images and targets in the order of a seed."""
    with np.load(FILE) as data:
        images = (torch.tensor(data["images"], dtype=torch.float32)[:, None] / 16 - 0.3) / 0.38
        targets = torch.tensor(data["targets"], dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order], targets[order]


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


def measure(name: str) -> float:
    """The accuracy after the last epoch."""
    run, variant, _ = name.split(": ")
    count, epochs, seed = int(run.split()[0]), int(run.split()[2]), int(name.split()[-1])
    options = dict(VARIANTS[variant])
    if variant.endswith(WARM_UP):
        options["compression_warmup"] = EPOCHS[epochs] * STEPS
    images, targets = digits(seed)
    torch.manual_seed(seed)
    replicas: list[nn.Module] = [SmallCNN(10, widths=[32, 64]) for _ in range(count)]
    held_out = images[TRAINED:], targets[TRAINED:]
    return train(replicas, options, (images[:TRAINED], targets[:TRAINED]), held_out, epochs, seed)[-1]


@torch.no_grad()
def accuracy(replicas: list[nn.Module], images: Tensor, targets: Tensor) -> float:
    """In percent, with the mean of the replicas' running statistics."""
    network = replicas[0].eval()
    for buffers in zip(*(replica.buffers() for replica in replicas), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(buffers).mean(0))
    return 100 * float((network(images).argmax(1) == targets).float().mean())


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=5)
    options = made.parse_args()
    torch.set_num_threads(1)
    pieces = Pieces(options)
    columns = [f"{count} workers, {epochs} epochs" for epochs in EPOCHS for count in WORKERS]
    names = [
        f"{column}: {variant}: seed {seed}"
        for seed in range(options.seeds)
        for column in columns
        for variant in VARIANTS
    ]
    if not pieces.measure(names, measure):
        return
    rows = [("compression", *columns)]
    for variant in VARIANTS:
        found = [
            [pieces.known[f"{column}: {variant}: seed {seed}"] for seed in range(options.seeds)] for column in columns
        ]
        rows.append((variant, *(f"{statistics.mean(each):.2f} ± {statistics.stdev(each):.2f}" for each in found)))
    warm_ups = " and ".join(f"{warm_up} of {epochs}" for epochs, warm_up in EPOCHS.items())
    report(
        Path(__file__).with_suffix(".md"),
        "Top-k and momentum",
        f"{__doc__}\nEpochs of {TRAINED} images, {options.seeds} seeds, each with its own split, weights and batches. "
        f"The warm-up takes {warm_ups} epochs.",
        rows,
        "one thread",
    )


if __name__ == "__main__":
    main()
