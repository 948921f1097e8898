"""Push and pull of 100 MB by 2 workers to 2 servers: this package, raw sockets, torch RPC and gRPC, in turn.

    python benchmarks/parameter_server/transport.py [--megabytes 100] [--rounds 40] [--repeats 3]

All run on one machine, over TCP on the loopback interface where nothing else is said, with one thread per process for
torch; in all of them the servers average the two gradients and make one step of SGD. The figure is bytes both ways of
both workers per second of the median round.

The raw loop receives into the parameters themselves, and a server's gradients into memory that it reuses. libzmq
receives into memory of its own, so this package's workers copy each slice into the parameter. "Raw sockets, same
copies" receives 2 MiB into a buffer and copies them, too. The servers' arithmetic is the same number of operations, but
not the same code: raw sockets add whole halves with two calls; ours interpolates and steps slice by slice with the
user's torch optimizer.

Both cores are busy all the time in all of the first rows, so it is the processor time of a round that limits them: that
of all processes in user and in kernel mode, their start included. Slices of other sizes, and steps whose values come
while gradients still leave (pipelined, what dedicated servers do over slow links), are tried for that.

Prints the figures, and writes them to transport.md beside this file unless --page names another.
"""

import argparse
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import peers
import torch
import zmq

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.drivers.sockets import Listener
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS, SERVERS = 2, 2
WARM_UP = 2


def parameters_of(numel: int) -> list[torch.nn.Parameter]:
    """Ten layers."""
    return [torch.nn.Parameter(torch.zeros(numel // 10)) for _ in range(10)]


def optimizer_of(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD, as all peers do it."""
    return torch.optim.SGD(parameters, lr=peers.LEARNING_RATE)


def our_server(
    id: int, specification: Specification, scheme: str, keys: list[KeyPair] | None, rounds: int, directory: Path
) -> None:
    """A server of this package; runs until it is killed."""
    endpoint = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{directory}/socket-{id}"
    listener = Listener(endpoint, keys is not None, insecure=True)
    peers.publish(directory / f"server-{id}", listener.endpoint)
    views = unchanging(members(keys, directory))
    ServerService(specification, views, id, listener, keys[id] if keys else None, insecure=True).run()


def members(keys: list[KeyPair] | None, directory: Path) -> View:
    """Return the view of all servers and workers, as soon as all servers listen."""
    endpoints = [peers.wait_for(directory / f"server-{server}") for server in range(SERVERS)]
    public = [key.public for key in keys] if keys else [""] * (SERVERS + WORKERS)
    servers = tuple(ServerInfo(server, endpoints[server], public[server]) for server in range(SERVERS))
    return View(1, servers, tuple(WorkerInfo(worker, 0, public[SERVERS + worker]) for worker in range(WORKERS)))


def our_worker(
    id: int, specification: Specification, scheme: str, keys: list[KeyPair] | None, rounds: int, directory: Path
) -> list[float]:
    """A worker of this package."""
    views = unchanging(members(keys, directory))
    parameters = parameters_of(sum(info.numel for info in specification.parameters))
    optimizer = optimizer_of(parameters)
    key = keys[SERVERS + id] if keys else None
    worker = Worker(specification, [p.data for p in parameters], views, id, keys=key)
    worker.initialise()
    worker.join()
    gradients = [torch.ones_like(parameter) for parameter in parameters]

    def exchange() -> None:
        worker.begin_step(hyperparameters(optimizer), 1)
        for index in reversed(range(len(gradients))):
            worker.push(index, gradients[index])
        worker.end_step()
        for index in range(len(gradients)):
            worker.wait(index)

    return peers.timed(rounds, exchange)


def run(functions: list[Callable[[], Any]], endless: int) -> float:
    """The median seconds of a round, over the workers; the first `endless` processes are ended by this one."""
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for function in functions:
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=call, args=(function, sender)))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    results = [pipe.recv() for pipe in pipes[endless:]]
    for process in processes[:endless]:
        process.kill()
    for process in processes:
        process.join()
    return max(statistics.median(seconds[WARM_UP:]) for seconds in results if seconds)


def call(function: Callable[[], Any], pipe: Connection) -> None:
    """Run in a process of its own and send the result."""
    torch.set_num_threads(1)
    pipe.send(function())


def ours(numel: int, rounds: int, scheme: str, encrypted: bool = False, **options: Any) -> float:
    """Seconds of a round with this package."""
    parameters = parameters_of(numel)
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    specification = Specification.of(named, optimizer_of(parameters), WORKERS, servers=SERVERS, **options)
    keys = [KeyPair.create() for _ in range(SERVERS + WORKERS)] if encrypted else None
    with tempfile.TemporaryDirectory() as name:
        arguments = (specification, scheme, keys, rounds, Path(name))
        functions: list[Callable[[], Any]] = [partial(our_server, server, *arguments) for server in range(SERVERS)]
        functions += [partial(our_worker, worker, *arguments) for worker in range(WORKERS)]
        return run(functions, SERVERS)


def peer(numel: int, rounds: int, server: Callable[..., Any], worker: Callable[..., Any]) -> float:
    """Seconds of a round with a peer."""
    with tempfile.TemporaryDirectory() as name:
        arguments = (WORKERS, SERVERS, numel, rounds, Path(name))
        functions: list[Callable[[], Any]] = [partial(server, id, *arguments) for id in range(SERVERS)]
        first = SERVERS if worker is peers.rpc else 0
        functions += [partial(worker, first + id, *arguments) for id in range(WORKERS)]
        return run(functions, 0 if worker is peers.rpc else SERVERS)


def raw(numel: int, rounds: int, scheme: str, copies: bool) -> float:
    """Seconds of a round with raw sockets."""
    server = partial(peers.raw_server, scheme=scheme)
    return peer(numel, rounds, server, partial(peers.raw_worker, scheme=scheme, copies=copies))


def main() -> None:
    """Run all variants in turn and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    numel = int(options.megabytes * 1e6 / 4 / 20) * 20
    rounds = options.rounds + WARM_UP
    variants: dict[str, Callable[[], float]] = {
        "raw sockets, tcp": lambda: raw(numel, rounds, "tcp", False),
        "raw sockets, tcp, same copies": lambda: raw(numel, rounds, "tcp", True),
        "raw sockets, unix": lambda: raw(numel, rounds, "ipc", False),
        "raw sockets, unix, same copies": lambda: raw(numel, rounds, "ipc", True),
        "cnnstrategies, tcp": lambda: ours(numel, rounds, "tcp"),
        "cnnstrategies, ipc": lambda: ours(numel, rounds, "ipc"),
        "cnnstrategies, tcp, CURVE": lambda: ours(numel, rounds, "tcp", encrypted=True),
        "cnnstrategies, tcp, slices of 512 KiB": lambda: ours(numel, rounds, "tcp", slice_bytes=1 << 19),
        "cnnstrategies, tcp, slices of 10 MB": lambda: ours(numel, rounds, "tcp", slice_bytes=10_000_000),
        "cnnstrategies, tcp, pipelined": lambda: ours(numel, rounds, "tcp", pipelined=True),
        "torch RPC": lambda: peer(numel, rounds, peers.rpc, peers.rpc),
        "gRPC": lambda: peer(numel, rounds, peers.grpc_server, peers.grpc_worker),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    worked: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, variant in variants.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            speeds[name].append(WORKERS * 2 * numel * 4 / variant() / 1e9)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spans = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            worked[name].append((1000 * spans[0] / rounds, 1000 * spans[1] / rounds))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    median = {name: statistics.median(values) for name, values in speeds.items()}
    page = [
        "# Push and pull through the parameter server",
        "",
        *(line for line in (__doc__ or "").splitlines()[4:-2]),
        "",
        f"- {date.today()}, {time.strftime('%H:%M')}; {os.cpu_count()} cores {model}, {platform.system()} "
        f"{platform.release()}; load {os.getloadavg()[0]:.1f} at the end, this benchmark's own included",
        f"- Python {platform.python_version()}, torch {torch.__version__}, pyzmq {zmq.__version__} (libzmq "
        f"{zmq.zmq_version()}), grpcio {grpc.__version__}",
        f"- `python benchmarks/parameter_server/transport.py --megabytes {options.megabytes:g} --rounds "
        f"{options.rounds} --repeats {options.repeats}`: {WORKERS} workers, {SERVERS} servers, all in turn, "
        f"{options.repeats} times",
        "",
        "| | GB/s, median | lowest to highest | of raw tcp | of raw tcp, same copies | of raw unix | "
        "of raw unix, same copies | ms of a round in user, in kernel mode |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in speeds.items():
        ratios = " | ".join(f"{median[name] / median[other]:.2f}" for other in list(speeds)[:4])
        modes = ", ".join(f"{statistics.median(each):.0f}" for each in zip(*worked[name], strict=True))
        page.append(f"| {name} | {median[name]:.2f} | {min(values):.2f} to {max(values):.2f} | {ratios} | {modes} |")
    text = "\n".join(page) + "\n"
    print(text)
    options.page.write_text(text)


if __name__ == "__main__":
    main()
