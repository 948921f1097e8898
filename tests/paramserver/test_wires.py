"""Runs over wires that change bytes, break, fall silent or are slow end with the same result as over sound wires.

For more runs of some seconds each: ``make faults RUNS=200``; ``FIRST`` is the seed of the first run.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cnnstrategies.commands.joining_cli import JoinerEnvironment
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.places import RunAddress, Watcher, find_place
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import ServerProcess
from cnnstrategies.paramserver.worker import connections
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server import run as run_module
from cnnstrategies.strategies.parameter_server.joining import JoiningStrategy
from tests.paramserver.roles import until
from tests.paramserver.rough_wires import FAR, HERE, Wires
from tests.runner.ports import free_port

RUNS = int(os.environ.get("CNNSTRATEGIES_FAULTS", "1"))
FIRST = int(os.environ.get("CNNSTRATEGIES_FAULTS_FROM", "0"))
TIMEOUT = 10.0  # seconds
SIZES = (240, 160, 80)
WORKERS, SERVERS, EPOCHS, BATCH = 2, 2, 2, 8
RATE = 0.25
ROWS = torch.arange(48 * max(SIZES), dtype=torch.float64).view(48, -1) % 7
_context = multiprocessing.get_context("fork")


class Sums(LightningModule):
    """A module whose gradients are exact means of rows and do not depend on the weights.

    So the final weights do not depend on the order of updates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in SIZES)

    def training_step(self, batch: Tensor) -> Tensor:
        means = batch.mean(0)
        return torch.stack([(weight * means[: len(weight)]).sum() for weight in self.weights]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Notes(Callback):
    """Records the time of each step and the final weights of a rank.

    Args:
        joins: Whether the run's ranks wait after a step until a joiner has made a step.
    """

    def __init__(self, directory: Path, joins: bool) -> None:
        self.directory = directory
        self.joins = joins
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.times.append(time.monotonic())
        joined = self.directory / "joined"
        if isinstance(trainer.strategy, JoiningStrategy):
            joined.touch()
        elif self.joins:
            until(joined.exists)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.directory / f"times-{trainer.global_rank}").write_text(json.dumps(self.times))
        weights = [weight.detach() for weight in pl_module.parameters()]
        torch.save(weights, self.directory / f"weights-{trainer.global_rank}")


@contextlib.contextmanager
def watching(coordinator: str, key_file: str) -> Iterator[None]:
    """Ask for the run's status again and again, and check that the answers come in time.

    The observer is a process: a thread might hold a lock of OpenSSL when the run forks a process, which would hang.
    """

    def watch() -> None:
        with Watcher(coordinator, KeyPair.load(key_file)) as watcher:
            heard = time.monotonic()
            while not over.wait(0.1):
                if watcher.ask(2.0) is not None:
                    heard = time.monotonic()
                assert time.monotonic() - heard < 2 * TIMEOUT, "the observer has no answer"

    over = _context.Event()
    process = _context.Process(target=watch, daemon=True)
    process.start()
    try:
        yield
        over.set()
        process.join(2 * TIMEOUT)
        assert process.exitcode == 0, "the observer waits for ever or has no answer"
    finally:
        process.kill()


def fit(strategy: ParameterServerStrategy, directory: Path, joins: bool, **more: Any) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, precision="64-true", callbacks=Notes(directory, joins), logger=False,
        max_epochs=EPOCHS, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    while True:
        trainer.fit(Sums(), DataLoader(list(ROWS), BATCH))  # type: ignore[arg-type]
        if not isinstance(strategy, JoiningStrategy):
            return


def join(run: RunAddress, strategy: ParameterServerStrategy, directory: Path) -> None:
    """Join a run and help until the run is over."""
    place = find_place(run, patience=60.0)
    with contextlib.suppress(RunEnded):
        fit(JoiningStrategy(strategy.options, run, place), directory, True, devices=1, plugins=JoinerEnvironment(place))


def train(mode: Any, replication: int, wires: Wires, directory: Path, joins: bool) -> str | None:
    """Train with wires to the coordinator and to each server; return the run's error message, None for success."""
    ports = [free_port() for _ in range(1 + SERVERS)]
    for port in ports:
        wires.lay(port)
    key_file = str(directory / "keys")
    KeyPair.create().save(directory / "keys")

    def behind_a_wire(address: Any, endpoint: str, *rest: Any) -> ServerProcess:
        keys, insecure, _, starter = rest
        endpoint = f"tcp://{HERE}:{ports[1 + address.id]}"
        return ServerProcess(address, endpoint, keys, insecure, known_as=FAR, starter=starter)

    coordinator = f"tcp://{FAR}:{ports[0]}"
    strategy = ParameterServerStrategy(
        mode, servers_per_node=SERVERS, replication=replication, timeout=TIMEOUT, key_file=key_file,
        coordinator=coordinator, start_method="fork", data_dispatch="dynamic" if joins else "static",
        max_joiners=int(joins),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, watching(coordinator, key_file):
        patch.setattr(run_module, "_listening", lambda endpoint: endpoint.replace(FAR, HERE))
        patch.setattr(run_module, "ServerProcess", behind_a_wire)
        patch.setattr(connections, "PROBE_SECONDS", 0.1)  # The test need not wait for the real interval.
        joiner = _context.Process(target=join, args=(RunAddress(coordinator, key_file), strategy, directory))
        if joins:
            joiner.start()
        wires.start()
        try:
            fit(strategy, directory, joins, devices=WORKERS)
        except Exception as error:
            return str(error)
        finally:
            wires.end()
            if joins:
                joiner.kill()
    return None


def run(seed: int, wires: Wires, directory: Path, joins: bool = False) -> None:
    """Train over faulty wires; check that every worker has one process's result and did not wait too long."""
    chance = random.Random(seed)
    mode, replication = "async" if joins else chance.choice(["sync", "async"]), chance.choice([1, 2])
    error = train(mode, replication, wires, directory, joins)
    print(mode, replication, wires.events, error)
    if error is not None:
        # Several stalls of one wire are a link that is down for too long, so the run may end.
        assert [fault for fault, _ in wires.events].count("stall") > 1, error
        assert re.search(r"(heard nothing|no answer) from server|was silent", error), error
        return
    updates = EPOCHS * ROWS.sum(0) / (BATCH * (WORKERS if mode == "sync" else 1))
    for rank in range(WORKERS):
        for weight in torch.load(directory / f"weights-{rank}"):
            assert torch.equal(weight, -RATE * updates[: len(weight)])
        times = json.loads((directory / f"times-{rank}").read_text())
        events = sorted([*times, *(when for _, when in wires.events)])
        longest = max(after - at for at, after in itertools.pairwise(events))
        assert joins or longest < 2 * TIMEOUT + wires.starved, (events, wires.events, wires.starved)


BRIEF = ("byte", "drop", "half")  # Too short for a time-out, after which other workers would repeat batches.
HARM = {
    "any harm": Wires,
    "one in a hundred pieces is lost": partial(Wires, faults=("nothing",), lost=0.01),
    "and a worker joins": partial(Wires, faults=BRIEF, faulty=2),
}


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
@pytest.mark.parametrize("wires", HARM.values(), ids=HARM)
def test_a_run_over_faulty_wires_ends_as_over_sound_wires(wires: Any, seed: int, tmp_path: Path) -> None:
    run(seed, wires(seed), tmp_path, joins=wires is HARM["and a worker joins"])


def test_a_run_survives_changed_bytes_and_broken_connections(tmp_path: Path) -> None:
    """Run a shorter version of the test above."""
    run(0, Wires(0, BRIEF, faulty=2), tmp_path)
