"""A host's side of `namespaces.py`: it waits for orders in a folder, and profiles or makes steps of a strategy."""

import argparse
import base64
import itertools
import json
import multiprocessing
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from networks import images, mobilenet, resnet_like, vgg_like
from ranks import TIMEOUT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning.costs import from_two_sizes
from cnnstrategies.planning.measure_nodes import profile

SAMPLES, MICROBATCHES, REPLICAS = 24, 6, (2, 1)
SMALLER = 4  # A second batch to profile is so much smaller, as in `plan`.
PORT = 29600


def alexnet() -> nn.Module:
    """AlexNet with the classifier that images of 64 pixels leave; without dropout."""
    made = torchvision.models.alexnet(num_classes=100, dropout=0.0)
    made.avgpool = nn.Identity()
    made.classifier[1] = nn.Linear(256, 4096)
    return made


def small_cnn() -> nn.Module:
    """A network with so little to do that its steps show what messages cost."""
    return SmallCNN(10, in_channels=3, widths=(16, 32))


# What makes it, side of the images, classes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "VGG-11": (vgg_like, 32, 100),
    "ResNet-20": (resnet_like, 32, 10),
    "MobileNetV3-Small": (mobilenet, 64, 100),
    "AlexNet": (alexnet, 64, 100),
    "SmallCNN": (small_cnn, 32, 10),
}
Steps = Callable[[int], float]


def host(title: str, folder: Path) -> None:
    """Profile, then measure what the other side asks for, one order after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    _, size, classes = NETWORKS[title]
    inputs, targets = images(size, SAMPLES, classes)
    (folder / f"ready{rank}").touch()
    variants: dict[str, Steps] = {}
    with ExitStack() as stack:
        for number in itertools.count():
            order = _order(folder / f"order{number}")
            dist.barrier()
            if order["what"] == "end":
                return
            answer: Any = None
            if order["what"] == "profile":
                share = SAMPLES // world
                traced = trace(NETWORKS[title][0]())
                large, small = (profile(traced, inputs[:count]) for count in (share, share // SMALLER))
                if rank == 0:
                    combined = from_two_sizes(large, small, has_batch_norm(traced))
                    (folder / "profile").write_text(base64.b64encode(pickle.dumps(combined)).decode())
            elif order["what"] == "link":
                answer = _latency(rank)
            else:
                if not variants:
                    variants = _variants(title, inputs, targets, folder, stack)
                if order["strategy"] == "hybrid":
                    variants["hybrid"] = _hybrid(title, inputs, targets, order["cut"], order["run_ahead"])
                times = []
                for index in range(order["rounds"] + 1):
                    dist.barrier()
                    times.append(variants[order["strategy"]](order["steps"] if index else 1))
                answer = times[1:]
            dist.barrier()
            if rank == 0:
                write(folder / f"answer{number}", answer)


def _order(file: Path) -> Any:
    while not file.exists():
        time.sleep(0.02)
    return json.loads(file.read_text())


def write(file: Path, content: Any) -> None:
    """Write an order or an answer, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(file)


def _latency(rank: int) -> float:
    """Seconds that a small message takes one way between the first two hosts."""
    message, times = torch.zeros(256), []
    for _ in range(60 if rank < 2 else 0):
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        times.append((time.perf_counter() - start) / 2)
    return min(times[10:], default=0.0)  # In the others a quota has stopped one of them.


def _block(step: Callable[[], None], end: Callable[[], None] = lambda: None) -> Steps:
    """Makes some steps, and says what one took."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        end()
        dist.barrier()
        return (time.perf_counter() - start) / count

    return run


def _variants(title: str, inputs: Tensor, targets: Tensor, folder: Path, stack: ExitStack) -> dict[str, Steps]:
    """DDP, DDP with bf16 gradients, and a parameter server with a server on each host."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = inputs[rank::world], targets[rank::world]

    def replicated(hook: Any) -> Steps:
        torch.manual_seed(1)
        model = DistributedDataParallel(NETWORKS[title][0](), gradient_as_bucket_view=True)
        if hook is not None:
            model.register_comm_hook(None, hook)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(images), labels).backward()

        return _block(step)

    return {
        "ddp": replicated(None),
        "ddp_bf16": replicated(bf16_compress_hook),
        "parameter_server": _server(title, images, labels, folder, stack),
    }


def _hybrid(title: str, inputs: Tensor, targets: Tensor, cut: str, run_ahead: bool) -> Steps:

    rank, first = dist.get_rank(), REPLICAS[0]
    torch.manual_seed(1)
    pipeline = Pipeline(NETWORKS[title][0](), [cut], list(REPLICAS), MICROBATCHES, run_ahead=run_ahead)

    def step() -> None:
        pipeline.module.zero_grad(set_to_none=True)
        pipeline.step(inputs[rank::first], targets[rank::first], F.cross_entropy)

    return _block(step)


def _server(title: str, images: Tensor, labels: Tensor, folder: Path, stack: ExitStack) -> Steps:

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = NETWORKS[title][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    specification = Specification.of(model.named_parameters(), optimizer, world, servers=world, mode="sync")
    agreed = [specification]
    dist.broadcast_object_list(agreed)  # Its session is that of one run.
    specification = agreed[0]
    endpoints = [f"tcp://10.77.0.{number + 1}:{PORT}" for number in range(world)]
    servers = tuple(ServerInfo(number, endpoint) for number, endpoint in enumerate(endpoints))
    view = View(1, servers, tuple(WorkerInfo(number) for number in range(world)))

    def serve() -> None:
        torch.set_num_threads(1)
        ServerService(specification, unchanging(view), rank, endpoints[rank], insecure=True).run()

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    stack.callback(process.terminate)
    worker = Worker(specification, [parameter.data for parameter in model.parameters()], unchanging(view), rank)
    if rank == 0:
        worker.initialise()
    worker.join()
    stack.callback(worker.close)
    number = {parameter: index for index, parameter in enumerate(model.parameters())}
    for parameter, index in number.items():
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: worker.push(index, p.grad))

    def waiter(indices: list[int]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            for index in indices:
                worker.wait(index)

        return wait

    for module in model.modules():
        if indices := [number[parameter] for parameter in module.parameters(recurse=False)]:
            module.register_forward_pre_hook(waiter(indices))

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        worker.begin_step(hyperparameters(optimizer), len(images))
        loss.backward()
        worker.end_step()
        model.zero_grad()

    return _block(step, worker.wait_all)


def main() -> None:
    """Work for one network."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("network")
    options.add_argument("folder", type=Path)
    arguments = options.parse_args()
    host(arguments.network, arguments.folder)


if __name__ == "__main__":
    main()
