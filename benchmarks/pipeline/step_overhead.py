"""Processor time outside of the network in a step under `hybrid_pipeline`, against one device.

Under `hybrid_pipeline` every rank runs the whole step of the module, and operations on values of other ranks follow
rules. This page counts the processor time of a rank's main thread from the end of a step to the end of the next. It
does not count the forwards and backwards of the network, or of the rank's stage, and the transfers of activations and
their gradients between the stages. On one device the loading of the batch, the loss, the logs, clipping, the optimizer
and Lightning's loops are left. A rank of a pipeline needs more, and the excess is given in percent of the processor
time of one device's whole step.

The second table shows the parts, from other runs, because the stopwatches take time as well. A part does not count the
parts that it calls.
"""

import argparse
import functools
import importlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from networks import images
from ranks import report
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from whole_step import BATCH, CLASSES, CONTESTANTS, TIME_LIMIT, WARM_UP, Module, in_fork

Measured = dict[str, float]  # Seconds of each part, of a step.

NETWORK, TRANSPORT, REST = "network", "transport", "Lightning's loops, and the rest"
_OURS, _LIGHTNING = "cnnstrategies.", "lightning.pytorch."
_CHANNELS = ("exchange", "receive_forward", "send_forward", "receive_backward", "send_backward", "finish")
# Functions of the parts that are not counted: the functions' modules and names.
NOT_COUNTED = {
    NETWORK: (f"{_OURS}pipeline.division:Division.run", f"{_OURS}pipeline.whole_batch:gradients_of"),
    TRANSPORT: tuple(f"{_OURS}pipeline.channels:Channels.{name}" for name in _CHANNELS),
}
# Functions of the parts of the rest.
PARTS = {
    "operations by rules": (
        f"{_OURS}placed.runner:OperationRunner.run",
        f"{_OURS}placed.functions:Functions.__torch_function__",
    ),
    "messages": (
        *(f"{_OURS}placed.messages:Messages.{name}" for name in ("send", "receive")),
        *(f"{_OURS}placed.places:Places.{name}" for name in ("bring_all", "all_everywhere", "tell", "exchange")),
    ),
    "watch over stored values": (
        f"{_OURS}pipeline.stored_terms:StoredTerms.begin",
        *(f"{_OURS}pipeline.stored_terms:CallTerms.{name}" for name in ("run", "finish")),
        *(f"{_OURS}pipeline.stored_watch:StoredWatch.{name}" for name in ("begin", "take", "noted")),
    ),
    "declared loss, and its comparison": (
        f"{_OURS}pipeline.declared_loss:LossOfCall.gradients",
        f"{_OURS}pipeline.loss_verdict:judge",
    ),
    "microbatches: order, draws, sums of gradients": (f"{_OURS}pipeline.stage_runner:StageRunner.run_tasks",),
    "microbatches: running statistics": tuple(
        f"{_OURS}pipeline.buffers:StageBuffers.{name}" for name in ("begin", "finish", "send")
    ),
    "call of the network": (
        f"{_OURS}pipeline.placed_network:PlacedNetwork.__call__",
        f"{_OURS}pipeline.placed_call:PlacedCall.backward",
    ),
    "gradients after a backward": (f"{_OURS}strategies.hybrid_pipeline.steps:UserSteps.backward",),
    "loading": (
        f"{_OURS}strategies.hybrid_pipeline.loading:PlacedBatches.__next__",
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    ),
    "step of the module": ("whole_step:Module.training_step",),
    "logging": (f"{_OURS}strategies.hybrid_pipeline.logs:PlacedLogs._log_now", f"{_LIGHTNING}:LightningModule.log"),
    "clipping": (f"{_LIGHTNING}plugins.precision:Precision.clip_gradients",),
    "optimizer": ("torch.optim:AdamW.step",),
    REST: (f"{_LIGHTNING}loops.optimization.automatic:Closure.__call__",),
}


# Ways that were tried, and their effect on parts of the second table, in ms on all ranks. They were measured in one
# round before all of them and one round after, in turns with other work on the machine.
TRIED = (
    ("way", "part", "before", "after"),
    (
        "memory of messages, truth values, digests and lines of code are kept; gloo's methods are called directly",
        "messages",
        "3.3 to 4.0",
        "1.8 to 2.5",
    ),
    (
        "lists of tensors go to the rules for lists at once, which ask for each place once",
        "operations by rules",
        "4.0 to 4.7",
        "2.7 to 3.7",
    ),
    (
        "states of modules that alternate are kept, as BatchNorm's momentum does; tables that nobody replaces are not "
        "compared; the state for a second forward is built only if that forward runs; quiet forwards of the last stage "
        "are not watched one by one",
        "watch over stored values",
        "1.5 to 3.4",
        "0.9 to 1.6",
    ),
    (
        "the factors of the declared loss are numbers, and there is no context for autocast where it is not on",
        "declared loss",
        "2.4",
        "1.6",
    ),
    (
        "gradients of other stages are not cut into microbatches; NumPy's random state is read only if it has changed; "
        "no stopwatch without a watcher; known forms of results",
        "microbatches",
        "4.0 to 4.5",
        "2.8 to 3.1",
    ),
    ("weights of the microbatches' statistics are kept", "running statistics", "1.1 to 1.3", "0.8 to 0.9"),
    ("sums of gradients by one call of torch for all parameters", "microbatches", "0.2 to 0.5", "no change"),
)


class Ledger:
    """Processor time of the main thread by part. A part does not count the parts that it calls."""

    def __init__(self) -> None:
        self.times: defaultdict[str, float] = defaultdict(float)
        self._parts, self._since = [REST], time.thread_time()

    def enter(self, part: str) -> None:
        """Begin a part."""
        self._turn()
        self._parts.append(part)

    def leave(self, part: str) -> None:
        """End a part, if it has begun last."""
        if self._parts[-1] == part:
            self._turn()
            self._parts.pop()

    def taken(self) -> Measured:
        """Return the times since the last call."""
        self._turn()
        taken, self.times = dict(self.times), defaultdict(float)
        return taken

    def count(self, part: str, function: str) -> None:
        """Count a function for a part, unless the network calls the function.

        Args:
            part: The part.
            function: Module and name of the function.
        """
        module, _, name = function.partition(":")
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(module.rstrip(".")))
        setattr(owner, last, self.timed(part, getattr(owner, last)))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts for a part, unless the network calls it."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._parts[-1] == NETWORK:
                return function(*args, **kwargs)
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(part)

        return run

    def _turn(self) -> None:
        now = time.thread_time()
        self.times[self._parts[-1]] += now - self._since
        self._since = now


class StepTimes(Callback):
    """Notes the times of each step, in a file for each rank.

    Args:
        folder: Where the files go.
        ledger: Counts the times.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._folder, self._ledger = folder, ledger
        self._notes: list[Measured] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Note the times."""
        self._notes.append(self._ledger.taken())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the notes."""
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(self._notes))


# Otherwise the hooks would count as hooks of a user, which may look at weights.
StepTimes.__module__ = "cnnstrategies.clock"


def count_one_device(ledger: Ledger, module: Module) -> None:
    """Count the network of one device, whose backward begins with the gradient of its result."""
    forward, backward = ledger.timed(NETWORK, module.network.forward), LightningModule.backward

    def run(inputs: Tensor) -> Tensor:
        outputs: Tensor = forward(inputs)
        outputs.register_hook(lambda _: ledger.enter(NETWORK))  # type: ignore[no-untyped-call]
        return outputs

    def run_backward(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        ledger.leave(NETWORK)

    module.network.forward, LightningModule.backward = run, run_backward  # type: ignore[method-assign]


def train(folder: Path, name: str, steps: int, has_parts: bool) -> None:
    """Train; the ranks write their notes into the folder.

    Args:
        folder: The folder.
        name: Name of the contestant.
        steps: Number of steps.
        has_parts: Whether the parts are counted.
    """
    torch.set_num_threads(1)
    strategy, devices = CONTESTANTS[name]
    ledger, module = Ledger(), Module()
    for part, functions in (NOT_COUNTED | PARTS if has_parts else NOT_COUNTED).items():
        for function in functions:
            ledger.count(part, function)
    if devices == 1:
        count_one_device(ledger, module)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        max_epochs=1,
        callbacks=[StepTimes(folder, ledger)],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*images(32, BATCH * steps, CLASSES)), BATCH))


def measure(name: str, steps: int, has_parts: bool) -> list[Measured]:
    """Return for each rank the median of each part, in seconds."""
    devices = CONTESTANTS[name][1]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)

        def run(_: Path) -> None:
            train(folder, name, steps, has_parts)

        in_fork(run, 0, TIME_LIMIT)
        notes = [json.loads((folder / f"{rank}.json").read_text())[WARM_UP:] for rank in range(devices)]
    parts = sorted({part for of_rank in notes for step in of_rank for part in step})
    return [{part: statistics.median(step.get(part, 0.0) for step in of_rank) for part in parts} for of_rank in notes]


def outside(measured: Measured) -> float:
    """Return the seconds that count."""
    return sum(seconds for part, seconds in measured.items() if part not in NOT_COUNTED)


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the median, and the smallest and the largest value."""
    return f"{statistics.median(values):.1f}{unit} ({min(values):.1f} to {max(values):.1f})"


def in_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row is the heading."""
    heading, *lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([heading, "|" + "---|" * len(rows[0]), *lines])


def main() -> None:
    """Measure in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    ranks = [(name, rank) for name, (_, devices) in CONTESTANTS.items() for rank in range(devices)]
    rounds: dict[bool, list[dict[tuple[str, int], Measured]]] = {False: [], True: []}
    for _ in range(options.rounds):
        for has_parts, measured in rounds.items():
            of_round = {
                (name, rank): times
                for name in CONTESTANTS
                for rank, times in enumerate(measure(name, options.steps, has_parts))
            }
            measured.append(of_round)
            print(has_parts, {key: round(outside(times) * 1e3, 2) for key, times in of_round.items()}, flush=True)
    device = ("one device", 0)
    rows = [("rank", "ms outside of the network", "ms in the network", "ms for transport", "excess, % of a step")]
    for key in ranks:
        excess = [100 * (outside(of[key]) - outside(of[device])) / sum(of[device].values()) for of in rounds[False]]
        times = [
            spread([1e3 * value(of[key]) for of in rounds[False]])
            for value in (outside, partial(_seconds, NETWORK), partial(_seconds, TRANSPORT))
        ]
        rows.append((f"{key[0]}, rank {key[1]}", *times, spread(excess, " %")))
    parts = [("part", *(f"{name}, rank {rank}" for name, rank in ranks))]
    for part in PARTS:
        medians = [statistics.median(of[key].get(part, 0.0) for of in rounds[True]) for key in ranks]
        parts.append((part, *(f"{1e3 * median:.2f}" for median in medians)))
    report(
        Path(__file__).with_suffix(".md"),
        "Processor time outside of the network",
        f"{__doc__}\nResNet-20 with {BATCH} images of 32 x 32, two stages, four microbatches, AdamW, clipping by norm, "
        f"two logged values, {options.steps} steps, {options.rounds} rounds in turns: median (smallest to largest). "
        f"Milliseconds of the parts:\n\n{in_markdown(parts)}\n\nThe target is 2 %, and it is not met. What is left is "
        "spread over many places: gloo takes 0.17 ms to send and receive a message, and a step has five; each "
        "microbatch needs 0.7 ms for its order, seeds, sums and statistics; torch asks the rules for about 90 "
        "operations, of which 60 detach gradients. Ways that were tried, and the milliseconds of their parts:\n\n"
        f"{in_markdown(TRIED)}\n\nMilliseconds of a step:",
        rows,
    )


def _seconds(part: str, measured: Measured) -> float:
    return measured.get(part, 0.0)


if __name__ == "__main__":
    main()
