"""One step of a worker, measured: when each gradient leaves, when the new values are there, who waits.

VGG-11 on 2 workers with 2 servers on one machine, mode sync. A bar begins when backward has made a gradient and the
worker pushes it, and ends when the worker has taken over the new values; it does so when a layer of the next forward
asks for its parameters (the mark), or while it waits for others.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import fits  # First: it makes the pipeline's benchmarks importable.
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from networks import images, vgg_like
from ranks import report
from torch import nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS = SERVERS = 2
CLASSES = 100


def serve(specification: Specification, folder: Path, id: int) -> None:
    """A server; it is ended from outside."""
    torch.set_num_threads(1)
    ServerService(specification, unchanging(members(folder)), id, endpoint(folder, id)).run()


def endpoint(folder: Path, id: int) -> str:
    """Where a server listens."""
    return f"ipc://{folder}/server-{id}"


def members(folder: Path) -> View:
    """Return the view of all servers and workers."""
    servers = tuple(ServerInfo(id, endpoint(folder, id)) for id in range(SERVERS))
    return View(1, servers, tuple(WorkerInfo(id) for id in range(WORKERS)))


def work(specification: Specification, folder: Path, id: int, steps: int, batch_size: int) -> None:
    """Train; worker 0 writes down the step before the last."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = vgg_like()
    parameters = list(network.parameters())
    optimizer = fits.sgd(parameters)
    trace: list[tuple[str, int, float]] = []

    def note(event: str, number: int) -> None:
        trace.append((event, number, time.perf_counter()))

    def wait(indices: list[int]) -> None:
        for number in indices:
            worker.wait(number)
            note("wait", number)

    def push(parameter: nn.Parameter) -> None:
        note("push", index[parameter])
        worker.push(index[parameter], parameter.grad)

    views = unchanging(members(folder))
    worker = Worker(
        specification, [p.data for p in parameters], views, id, on_arrival=lambda number, _: note("arrived", number)
    )
    worker.initialise()
    worker.join()
    index = {parameter: number for number, parameter in enumerate(parameters)}
    for module in network.modules():
        indices = [index[parameter] for parameter in module.parameters(recurse=False)]
        module.register_forward_pre_hook(lambda _module, _inputs, indices=indices: wait(indices))
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(push)
    inputs, targets = images(32, batch_size, CLASSES)
    moments: list[dict[str, float]] = []
    for step in range(steps):
        if step == steps - 2:
            trace.clear()
        moment = {"forward": time.perf_counter()}
        loss = F.cross_entropy(network(inputs), targets)
        moment["backward"] = time.perf_counter()
        worker.begin_step(hyperparameters(optimizer), batch_size)
        loss.backward()
        worker.end_step()
        network.zero_grad()
        moment["end"] = time.perf_counter()
        moments.append(moment | {"waited": worker.counters.seconds_waited})
    worker.wait_all()
    if id == 0:
        (folder / "trace").write_text(json.dumps([moments[-2:], trace]))
    worker.close()


def measure(steps: int, batch_size: int) -> tuple[list[dict[str, float]], list[tuple[str, int, float]]]:
    """The moments of the last two steps, and the trace from the first of them on."""
    network: nn.Module = vgg_like()
    specification = Specification.of(
        network.named_parameters(), fits.sgd(network.parameters()), WORKERS, servers=SERVERS
    )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = [context.Process(target=serve, args=(specification, folder, id)) for id in range(SERVERS)]
        workers = [
            context.Process(target=work, args=(specification, folder, id, steps, batch_size)) for id in range(WORKERS)
        ]
        for process in (*running, *workers):
            process.start()
        for process in workers:
            process.join()
        for process in running:
            process.kill()
            process.join()
        moments, trace = json.loads((folder / "trace").read_text())
    return moments, trace


def first_after(trace: list[tuple[str, int, float]], event: str, index: int, moment: float) -> float:
    """When something first happened to a parameter after a moment."""
    return min(when for kind, number, when in trace if (kind, number) == (event, index) and when > moment)


def main() -> None:
    """Measure, draw, and report what overlaps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()
    (step, following), trace = measure(options.steps, options.batch_size)
    start = step["forward"]
    pushed = {index: when for event, index, when in trace if event == "push" and when < step["end"]}
    needed = {index: when for event, index, when in trace if event == "wait" and when > following["forward"]}
    arrived = {index: first_after(trace, "arrived", index, when) for index, when in pushed.items()}
    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for begin, end, colour, label in (
        (step["forward"], step["backward"], "#E8F0FE", "forward"),
        (step["backward"], step["end"], "#FDEBDD", "backward"),
        (following["forward"], following["backward"], "#E8F0FE", None),
    ):
        axes.axvspan(1000 * (begin - start), 1000 * (end - start), color=colour, label=label, linewidth=0)
    rows = sorted(pushed)
    axes.barh(
        rows,
        [1000 * (arrived[row] - pushed[row]) for row in rows],
        left=[1000 * (pushed[row] - start) for row in rows],
        color="#4C8BF5",
        height=0.7,
        label="from the push to the new values",
    )
    axes.plot(
        [1000 * (needed[row] - start) for row in rows], rows, "|", color="#D93025", label="used by the next forward"
    )
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("parameter, in the order of use")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", fontsize=8)
    here = Path(__file__)
    figure.savefig(here.with_suffix(".png"))
    early = sum(when < step["end"] for when in pushed.values()) - 1
    backward = step["end"] - step["backward"]
    waited = following["waited"] - step["waited"]
    report(
        here.with_suffix(".md"),
        "A step of a worker",
        f"{__doc__}\n![timeline]({here.with_suffix('.png').name})",
        [
            ("what", "value"),
            ("parameters pushed while backward goes on", f"{early} of {len(rows)}"),
            ("forward", f"{1000 * (step['backward'] - start):.0f} ms"),
            ("backward", f"{1000 * backward:.0f} ms"),
            ("the next forward", f"{1000 * (following['backward'] - following['forward']):.0f} ms"),
            ("of it waiting for new values and taking them over", f"{1000 * waited:.0f} ms"),
        ],
    )


if __name__ == "__main__":
    main()
