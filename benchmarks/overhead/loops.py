"""Networks and the loader of all contestants, and the training loops without `fit`; `fit.py` starts them."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from cnnstrategies.networks import SmallCNN, SmallResNet
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.pipeline.engine import Pipeline

sys.path.append(str(Path(__file__).parents[1] / "parameter_server"))
from against import FOLDER, Turns

WORKERS, STEPS, MICROBATCHES, CLASSES = 2, 5, 4, 10  # steps of a turn
SAMPLES = 1_000_000  # of an epoch that does not end
# Class, arguments, the size of its images, images of a rank, and after what a pipeline cuts it.
NETWORKS: dict[str, tuple[type[nn.Module], dict[str, Any], int, int, str]] = {
    "SmallCNN": (SmallCNN, {"in_channels": 3, "widths": [32, 64], "dropout": 0.0}, 16, 16, "block1"),
    "ResNet-20": (SmallResNet, {"blocks": 3}, 32, 8, "group1"),
    "ResNet-56": (SmallResNet, {"blocks": 9}, 32, 8, "group1"),
}


class Noise(Dataset[tuple[Tensor, int]]):
    """Images of noise."""

    def __init__(self, size: int) -> None:
        self.images = torch.randn(256, 3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image and its class."""
        return self.images[index % 256], index % CLASSES


class TurnLoader(DataLoader[Any]):
    """A plain loader that waits for its turn before some of the batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches."""
        turns = Turns(int(os.environ.get("LOCAL_RANK", "0")))
        for place, batch in enumerate(super().__iter__()):
            if place % STEPS == 0:
                turns.take()
            yield batch


class Data(LightningDataModule):
    """The same for `fit`."""

    def __init__(self, size: int, batch: int) -> None:
        super().__init__()
        self.size, self.batch = size, batch

    @override
    def train_dataloader(self) -> TurnLoader:
        return TurnLoader(Noise(self.size), self.batch, shuffle=True)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the configuration."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same weights in every process."""
    torch.manual_seed(0)
    kind, arguments, *_ = NETWORKS[name]
    network = kind(CLASSES, **arguments)
    return network, sgd(network)


def loader(name: str, rank: int, ranks: int = WORKERS) -> TurnLoader:
    """A rank's, with the sampler that Lightning puts in."""
    size, batch = NETWORKS[name][2:4]
    data = Noise(size)
    return TurnLoader(data, batch, sampler=DistributedSampler(data, ranks, rank))


def start(name: str, loop: Callable[[str, int], None]) -> None:
    """Run a loop on all ranks, in a process group."""

    def main(rank: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{os.environ[FOLDER]}/store", rank=rank, world_size=WORKERS)
        loop(name, rank)

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank,)) for rank in range(WORKERS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def ddp(name: str, rank: int) -> None:
    """Replicas by torch's own wrapper."""
    network, optimizer = make(name)
    model = DistributedDataParallel(network)
    for images, targets in loader(name, rank):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


def pipeline(name: str, rank: int) -> None:
    """The engine of `hybrid_pipeline`; the first rank loads, and takes the turns."""
    network, _ = make(name)
    with Pipeline(network, [NETWORKS[name][4]], [1, 1], MICROBATCHES) as engine:
        optimizer = sgd(engine.module)
        batches = iter(loader(name, 0, 1)) if rank == 0 else iter(lambda: (None, None), 0)
        for images, targets in batches:
            engine.step(images, targets, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()


def specify(name: str) -> Specification:
    """Return the specification for servers and workers; it is made once."""
    network, optimizer = make(name)
    return Specification.of(network.named_parameters(), optimizer, WORKERS, servers=1, mode="sync")


def serve(specification: Specification, view: View) -> None:
    """The only server."""
    torch.set_num_threads(1)
    ServerService(specification, unchanging(view), 0, view.servers[0].endpoint).run()


def servers(specification: Specification, name: str, rank: int) -> None:
    """The engine of `parameter_server`: one server beside the workers, as `fit` has it."""
    network, optimizer = make(name)
    parameters = list(network.parameters())
    endpoint = f"ipc://{os.environ[FOLDER]}/server"
    view = View(1, (ServerInfo(0, endpoint),), tuple(WorkerInfo(id) for id in range(WORKERS)))
    if rank == 0:
        multiprocessing.get_context("fork").Process(target=serve, args=(specification, view), daemon=True).start()
    worker = Worker(specification, [parameter.data for parameter in parameters], unchanging(view), rank)
    worker.initialise()
    worker.join()
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, i=index: worker.push(i, p.grad))
    samples = NETWORKS[name][3]
    for images, targets in loader(name, rank):
        loss = F.cross_entropy(network(images), targets)
        worker.begin_step(hyperparameters(optimizer), samples=samples)
        loss.backward()
        worker.end_step()
        network.zero_grad()
        worker.wait_all()


class Plain(LightningModule):
    """A module that logs nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network, self.optimizer = make(name)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self.network(images), targets)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def lightning(name: str) -> None:
    """Lightning's Trainer without all that can be left out: what no callback of ours can be quicker than."""
    torch.set_num_threads(1)
    shown = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=WORKERS, strategy="ddp_fork", max_epochs=1, **shown)
    trainer.fit(Plain(name), Data(*NETWORKS[name][2:4]))


if __name__ == "__main__":
    contestant, network_name = sys.argv[1:]
    if contestant == "lightning":
        lightning(network_name)
    elif contestant == "parameter_server":
        start(network_name, partial(servers, specify(network_name)))
    else:
        start(network_name, {"ddp": ddp, "hybrid_pipeline": pipeline}[contestant])
