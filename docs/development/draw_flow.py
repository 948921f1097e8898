"""Draw the messages of one step under each strategy: ``python docs/development/draw_flow.py`` writes data-flow.md.

Under the strategies with process groups, a small network is trained on two or three processes, and the methods of
torch's process groups record who sends what. Under a parameter server the roles run in the simulator, which the tests
use, and their functions that send messages record them.
"""

import inspect
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.paramserver.messages import Kind
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.worker import WorkerRole
from cnnstrategies.strategies import HybridPipelineStrategy, SpatialStrategy

sys.path.append(str(Path(__file__).parents[2]))
from tests.conftest import quiet_trainer
from tests.paramserver.simulation import traces
from tests.paramserver.simulation.run import play

PAGE = Path(__file__).with_name("data-flow.md")
BATCH = 2  # Number of the batch whose messages are drawn. Messages of the first two batches belong to the set-up.
# Methods of process groups that all ranks of a group call, with what they do.
COLLECTIVES = {"allreduce": "sum", "broadcast": "copy", "allgather": "gather", "all_gather_single": "gather"}
# Modules that carry messages for others. A message is drawn with the function that has asked for it.
CARRIERS = (
    "pipeline.transport",
    "placed.functions",
    "placed.gloo_link",
    "placed.messages",
    "placed.places",
    "runtime.groups",
    "spatial.link",
    "spatial.parts",
    "strategies.pickling",
)


class Event(NamedTuple):
    """A message, or a collective operation.

    Attributes:
        moment: Time at which it began, in ns.
        rank: Number of the process that began it.
        receiver: Number of the process that a message goes to; None for a collective operation.
        operation: Name of the method.
        nbytes: Size in bytes.
        asker: The function of the package that asked for it.
        ranks: Numbers of the processes of a collective operation.
    """

    moment: int
    rank: int
    receiver: int | None
    operation: str
    nbytes: int
    asker: str
    ranks: Sequence[int]


def asker() -> str:
    """Return the innermost function of the package that is not in a module that carries messages for others."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        package, _, module = str(frame.f_globals.get("__name__", "")).partition(".")
        if package == "cnnstrategies" and not module.startswith(CARRIERS):
            return f"{module}.{frame.f_code.co_qualname.split('.<locals>')[0]}"
        if module.startswith("distributed.algorithms"):
            return "torch's DistributedDataParallel"
        frame = frame.f_back
    return "Lightning's loop"


class Recording(Callback):
    """Record the messages of a batch on each rank, from the end of the batch before it to its own end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_on = False

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.rank = int(os.environ["LOCAL_RANK"])
        model = trainer.strategy.model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # The all-reduce of DDP itself is in C++, where nothing can be recorded. This hook does the same.
            model.register_comm_hook(None, allreduce_hook)
        for name in ("send", *COLLECTIVES):
            setattr(dist.ProcessGroup, name, self.recorded(name, getattr(dist.ProcessGroup, name)))

    def recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of process groups that records its calls."""

        def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            if self.is_on:
                tensors = [tensor for tensor in _flat(arguments[0]) if isinstance(tensor, torch.Tensor)]
                nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                ranks = dist.get_process_group_ranks(group)
                receiver = ranks[arguments[1]] if name == "send" else None
                self.events.append(Event(time.monotonic_ns(), self.rank, receiver, name, nbytes, asker(), ranks))
            return method(group, *arguments, **options)

        return call

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.is_on = trainer.global_step == BATCH

    def on_train_end(self, *_: Any) -> None:
        Path(f"events_{self.rank}.json").write_text(json.dumps(self.events))


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, list | tuple) else [value]


def trained(strategy: Strategy, devices: int) -> list[Event]:
    """Train a small network under a strategy, and return the messages of one batch in the order of their times."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
    )
    trainer = quiet_trainer(strategy, devices, max_epochs=1, callbacks=Recording())
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(2, (64,)))
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            trainer.fit(ImageClassifier(network, 2, partial(torch.optim.SGD, lr=0.1)), DataLoader(data, 8))
            texts = [Path(f"events_{rank}.json").read_text() for rank in range(devices)]
        finally:
            os.chdir(before)
    return sorted(Event(*fields) for text in texts for fields in json.loads(text))


def lines_of(events: Sequence[Event]) -> list[str]:
    """Return the lines of a Mermaid diagram for messages. A collective operation is drawn once."""
    lines = []
    for _, rank, receiver, operation, nbytes, function, ranks in events:
        if receiver is not None:
            lines.append(f"rank {rank}->>rank {receiver}: {nbytes:,} bytes, {function}")
        elif rank == min(ranks) < max(ranks):
            lines.append(
                f"Note over rank {rank},rank {max(ranks)}: {COLLECTIVES[operation]}, {nbytes:,} bytes, {function}"
            )
    return lines


def simulated(settings: str) -> list[str]:
    """Simulate a run of a parameter server, and return the lines of a diagram for one step of all workers.

    Args:
        settings: Settings of the run, as a trace of the simulator has them.
    """
    (trace,) = traces.read(f"a step\n  data: {settings}\n  pace: 10\n")
    recorded = Steps()
    with (
        mock.patch.object(WorkerRole, "begin_step", recorded.counted(WorkerRole.begin_step)),
        mock.patch.object(Connections, "send", recorded.recorded(Connections.send, "worker {_id}", "server")),
        mock.patch.object(Outbox, "to_worker", recorded.recorded(Outbox.to_worker, "server {_server}", "worker")),
        mock.patch.object(Outbox, "to_server", recorded.recorded(Outbox.to_server, "server {_server}", "server")),
    ):
        outcome = play(trace)
    assert outcome.violation is None
    return recorded.lines


class Steps:
    """Recording of the messages of a simulated parameter server, while two workers make their sixth step.

    Attributes:
        lines: Lines of a Mermaid diagram.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._begun = 0

    def counted(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that begins a worker's step, and counts the steps of all workers."""

        def call(*arguments: Any, **options: Any) -> Any:
            self._begun += 1
            return begin(*arguments, **options)

        return call

    def recorded(self, send: Callable[..., Any], sender: str, receiver: str) -> Callable[..., Any]:
        """Return a method that sends messages, and records them."""

        def call(role: Any, to: int, kind: Kind, *arguments: Any, **options: Any) -> Any:
            if 11 <= self._begun < 13 and kind != Kind.PING:
                self.lines.append(f"{sender.format(**vars(role))}->>{receiver} {to}: {kind.name}")
            return send(role, to, kind, *arguments, **options)

        return call


FIGURES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "ddp": (
        "Each rank trains on other images. Lightning copies rank 0's decision whether to stop, and torch sums the "
        "gradients of all ranks, bucket by bucket.",
        lambda: lines_of(trained(DDPStrategy(start_method="fork"), 2)),
    ),
    "hybrid_pipeline": (
        "Ranks 0 and 1 have the convolution, and rank 2 has the classifier; this is `replicas: [2, 1]`. Ranks 0 and 1 "
        "load the images and hand out the small tensors. Activations go to rank 2, and their gradients come back. The "
        "first stage's replicas sum their gradients. Small values, such as the loss, go to all ranks.",
        lambda: lines_of(
            trained(
                HybridPipelineStrategy(replicas=[2, 1], cuts=["3"], microbatches=2, start_method="fork"),
                3,
            )
        ),
    ),
    "spatial": (
        "Each rank has half of the rows of each image. Rank 0 loads the images and hands out the rows. The convolution "
        "needs edge rows of the other rank, and their gradients go back. Batch norm and the classifier sum over all "
        "rows.",
        lambda: lines_of(trained(SpatialStrategy(parts=2, start_method="fork"), 2)),
    ),
    "parameter_server": (
        "Two workers make a step of `mode: sync`. Each of two servers is the primary of some slices and has backups of "
        "the others (`replication: 2`). Server 0 decides which workers make up the step. The worker that comes first "
        "has pushed before the first line of this figure.",
        lambda: simulated("servers 2, workers 2, replication 2"),
    ),
    "parameter_server_async": (
        "A part of a run with one server. The server applies each push at once, and no worker waits for another.",
        lambda: simulated("servers 1, workers 2, mode async"),
    ),
}
HEAD = """# The messages of one step

The figures show the messages of one step under each strategy. `python docs/development/draw_flow.py` makes this page.
It trains a network with one convolution, batch norm and one linear layer on batches of 8 images for each rank that
loads, and records each message with its size and with the function that has asked for it. The roles of the parameter
server run in the simulator of the tests. Messages that do not wait for each other may come in another order.
[The architecture page](architecture.md) follows a batch and a gradient through the code.
"""


def page() -> str:
    """Return the page. This trains and simulates all figures."""
    return "\n".join([HEAD, *(figure(name, text, lines()) for name, (text, lines) in FIGURES.items())])


def figure(name: str, text: str, lines: Sequence[str]) -> str:
    """Return a section with a diagram."""
    drawn = [f"    {line}" for line in lines]
    return "\n".join(
        [f"## {name}", "", textwrap.fill(text, 120), "", "```mermaid", "sequenceDiagram", *drawn, "```", ""]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
