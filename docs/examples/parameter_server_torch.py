"""A parameter server without Lightning: one server and two asynchronous workers on this machine.

python docs/examples/parameter_server_torch.py
"""

import multiprocessing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS, BATCH, STEPS = 2, 16, 20


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network with the same weights in every process, and its optimizer."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    network = nn.Sequential(features, nn.Flatten(), nn.Linear(128, 10))
    return network, torch.optim.SGD(network.parameters(), lr=0.05)


def specify() -> Specification:
    """Return the specification that servers and workers share: parameters, optimizer and mode."""
    network, optimizer = make()
    return Specification.of(network.named_parameters(), optimizer, WORKERS, servers=1, mode="async")


def members(folder: Path) -> View:
    """Return the membership: the server with its endpoint, and the workers."""
    return View(1, (ServerInfo(0, f"ipc://{folder}/server"),), tuple(WorkerInfo(id) for id in range(WORKERS)))


def serve(specification: Specification, folder: Path) -> None:
    """Run a server, which holds the parameters and makes the optimizer's steps, until the process is ended."""
    torch.set_num_threads(1)
    ServerService(specification, unchanging(members(folder)), 0, f"ipc://{folder}/server").run()


def work(specification: Specification, folder: Path, id: int) -> None:
    """Run a worker, which trains on random images."""
    torch.set_num_threads(1)
    network, optimizer = make()
    parameters = list(network.parameters())
    values = [parameter.data for parameter in parameters]
    worker = Worker(specification, values, unchanging(members(folder)), id)
    worker.initialise()  # The worker with the lowest number gives the servers its values.
    worker.join()
    for index, parameter in enumerate(parameters):
        # Each gradient is pushed while backward continues with the earlier layers.
        parameter.register_post_accumulate_grad_hook(lambda p, i=index: worker.push(i, p.grad))
    generator = torch.Generator().manual_seed(id)
    for step in range(STEPS):
        images = torch.randn(BATCH, 1, 16, 16, generator=generator)
        targets = (images.mean(dim=(1, 2, 3)) > 0).long()
        loss = F.cross_entropy(network(images), targets)
        worker.begin_step(hyperparameters(optimizer), samples=BATCH)
        loss.backward()
        worker.end_step()
        network.zero_grad()
        worker.wait_all()  # Alternatively, call worker.wait(index) before each layer of the next forward.
        if step % 5 == 0:
            print(f"worker {id}, step {step}: loss {loss.item():.3f}", flush=True)
    sent, waited = worker.counters.bytes_sent / 1e3, worker.counters.seconds_waited
    print(f"worker {id}: {sent:.0f} kB sent, {waited:.2f} s waited", flush=True)
    worker.close()


def main() -> None:
    """Start a server and the workers, and end the server after the last worker."""
    specification = specify()
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as name:
        server = context.Process(target=serve, args=(specification, Path(name)))
        each = [(specification, Path(name), id) for id in range(WORKERS)]
        workers = [context.Process(target=work, args=args) for args in each]
        for process in (server, *workers):
            process.start()
        for process in workers:
            process.join()
        server.terminate()
        server.join()
    if any(process.exitcode for process in workers):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
