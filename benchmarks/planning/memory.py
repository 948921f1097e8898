"""Compare the predicted peak memory of training with the real one, for published networks and four strategies.

    python benchmarks/planning/memory.py [--only NAME ...] [--strategies NAME ...] [--again]

The results are in `memory.json`, each with its commit, machine and day. A call makes the runs that are missing, and
writes the page with all results. With `--again` it repeats runs that are there. The script needs timm, and g++ to
compile the counter.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from counted import Counted, build
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from memory_networks import CLASSES, LARGE, NETWORKS
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link, Profile
from cnnstrategies.planning.measure import AUTOCAST, states_of, update_of
from cnnstrategies.planning.measure_bytes import bytes_of
from cnnstrategies.planning.measure_parts import part_costs
from cnnstrategies.planning.memory import NO_STATE, OptimizerMemory, PeakMemory, largest, replica_peak, shared_slices
from cnnstrategies.planning.part_peaks import PartedStep, part_peaks
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy, SpatialStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pipeline"))
from ranks import machine

BUILD = Path(__file__).resolve().parents[2] / "build/memory"
RESULTS = Path(__file__).with_suffix(".json")
STEPS, MICROBATCHES = 3, 4
STRATEGIES = ("one device", "ddp", "hybrid_pipeline", "parameter_server")
MIXED = tuple(f"{strategy}, bf16-mixed" for strategy in ("one device", "ddp", "parameter_server"))
PARTED = ("one device", "spatial", "one device, bf16-mixed", "spatial, bf16-mixed")
ALL = NETWORKS | LARGE
# The tables of the page: networks, and strategies with a precision if it is not float32.
TABLES = (([*NETWORKS], STRATEGIES), ([*NETWORKS][::5], MIXED), ([*LARGE], PARTED))
ROOM = 1.1  # Limit of a run as a multiple of the predicted peak.
CPU = torch.device("cpu")


class Module(LightningModule):
    """Trains a network with the cross-entropy."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = ALL[name].make()
        self.adam = list(ALL).index(name) % 2 == 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam for every second network, and SGD with momentum for the others."""
        if self.adam:
            return torch.optim.Adam(self.parameters(), 1e-4)
        return torch.optim.SGD(self.parameters(), 1e-4, momentum=0.9)


class Declared(Module):
    """The same with a declared loss, with which a pipeline runs in the order 1F1B."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.loss(self.network(batch[0]), batch[1])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a mean over samples."""
        return F.cross_entropy(outputs, targets)


class Note(Callback):
    """Notes the peak of the training, and of the set-up before it, in a file for each rank.

    Args:
        counted: The counter.
        others: Bytes that the process had before it built the network.
        predicted: Predicted peak of each rank.
        limited: Whether the training runs under the limit.
        folder: Folder of the files.
    """

    def __init__(
        self, counted: Counted, others: int, predicted: Sequence[PeakMemory], limited: bool, folder: Path
    ) -> None:
        self._counted, self._others, self._predicted, self._limited = counted, others, predicted, limited
        self._folder = folder
        self._set_up = 0
        self._steps: list[int] = []  # Peaks of the steps.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up has ended."""
        self._set_up = self._counted.most - self._others
        self._counted.forget()
        if self._limited:
            self._counted.limit(self._others + round(ROOM * self._predicted[trainer.global_rank].total))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the peak of a step."""
        self._steps.append(self._counted.most - self._others)
        self._counted.forget()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the peaks."""
        self._counted.limit(0)
        peaks = {"training": max(self._steps), "steps": self._steps, "set-up": self._set_up}
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(peaks))


Note.__module__ = "cnnstrategies.note"  # Otherwise the hooks would count as a user's, which may look at weights.


def plan(name: str, strategy: str, module: Module) -> tuple[list[PeakMemory], list[str]]:
    """Return the predicted peak of each rank, and the cuts of a pipeline."""
    strategy, _, precision = strategy.partition(", ")
    costs, samples = costs_of(name, module, AUTOCAST.get(precision)), ALL[name].samples
    profile, optimizer = Profile(costs), module.configure_optimizers()
    state = OptimizerMemory(states_of(optimizer), update_of(optimizer, CPU))
    if strategy == "one device":
        return [replica_peak(costs, state)], []
    if strategy == "ddp":
        return [replica_peak(profile.at(samples / 2), state, buckets=1.0)] * 2, []
    if strategy == "parameter_server":
        return [replica_peak(profile.at(samples / 2), NO_STATE, shared=shared_slices(costs, 1))] * 2, []
    if strategy == "spatial":
        compact = 0.5 if precision else 1.0
        parts = part_costs(trace_open(module.network, True), images_of(name), 2, None, compact=compact)
        return part_peaks(profile, parts, PartedStep(samples, state, holds_batch=True)), []
    cut = balanced(costs)
    schedules = [("gpipe", "never")] if type(module) is Module else [("1f1b", "never"), ("gpipe", "always")]
    peaks = []
    for schedule, checkpointing in schedules:
        job = Job(
            profile, Cluster.flat(2, Link(1e9, 1e-4)), samples, MICROBATCHES, replicas=(1, 1), schedule=schedule,
            activation_checkpointing=checkpointing, run_ahead=False, state_copies=2 + state.copies, update=state.update,
        )  # fmt: skip
        peaks.append(Predictor(job).stage_peaks(Layout((cut,), (1, 1)), False))
    return [largest(pair) for pair in zip(*peaks, strict=True)], [costs.nodes[cut - 1].name]


def images_of(name: str) -> Tensor:
    """Return two images without values (2, 3, H, W) of the size with which a network is trained."""
    return torch.empty(2, 3, ALL[name].size, ALL[name].size, device="meta")


def costs_of(name: str, module: Module, autocast: torch.dtype | None) -> GraphCosts:
    """Return the bytes of a network's nodes, which are kept for all strategies."""
    file = BUILD / f"{name}{'' if autocast is None else ', mixed'}.costs"
    if not file.exists():
        costs = bytes_of(trace_open(module.network, True), images_of(name), ALL[name].samples, autocast, CPU)
        file.write_bytes(pickle.dumps(costs))
    kept: GraphCosts = pickle.loads(file.read_bytes())
    return kept


def balanced(costs: GraphCosts) -> int:
    """Return the cut position that divides activations and training state most evenly."""

    def size(start: int, end: int) -> int:
        nodes = costs.nodes[start:end]
        return sum(node.saved_bytes + 3 * node.parameter_bytes for node in nodes)

    return min(costs.cut_positions, key=lambda cut: max(size(0, cut), size(cut, len(costs.nodes))))


def strategy_of(name: str, cuts: list[str], limit: int) -> Any:
    """Return the strategy for the trainer."""
    if name == "one device":
        return "auto"
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", start_method="fork")
    if name == "parameter_server":
        return ParameterServerStrategy(start_method="fork")
    if name == "spatial":
        return SpatialStrategy(parts=2, process_group_backend="gloo", start_method="fork")
    return HybridPipelineStrategy(
        replicas=[1, 1], cuts=cuts, microbatches=MICROBATCHES, memory_limit=limit, run_ahead=False, start_method="fork"
    )


def train(name: str, strategy: str, folder: Path, library: Path, limited: bool) -> None:
    """Train as a process of its own, and write the predicted and the real peaks."""
    torch.set_num_threads(1)
    seed_everything(1)
    warnings.simplefilter("ignore")
    counted = Counted(library)
    _, size, samples, has_maps = ALL[name]
    count = samples * STEPS
    targets = torch.randint(CLASSES, (count, size, size) if has_maps else (count,))
    data = TensorDataset(torch.randn(count, 3, size, size), targets)
    others = counted.now
    module = module_of(name, strategy)
    predicted, cuts = plan(name, strategy, module)
    (folder / "plan.json").write_text(json.dumps([asdict(peak) for peak in predicted]))
    counted.forget()
    kind, _, precision = strategy.partition(", ")
    share = samples // 2 if kind in ("ddp", "parameter_server") else samples
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if kind == "one device" else 2,
        strategy=strategy_of(kind, cuts, round(ROOM * largest(predicted).total)),
        precision=precision or "32-true",
        max_epochs=1,
        callbacks=[Note(counted, others, predicted, limited, folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(data, share))


def measured(name: str, strategy: str, library: Path, limited: bool) -> dict[str, Any]:
    """Train in a new process, and return the predicted and the real peaks, or the end of the output."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        process = multiprocessing.get_context("fork").Process(
            target=quiet, args=(folder, train, name, strategy, folder, library, limited)
        )
        process.start()
        process.join(900)
        process.kill()
        process.join()
        files = sorted(folder.glob("[0-9].json"))
        predicted = json.loads((folder / "plan.json").read_text()) if (folder / "plan.json").exists() else []
        result: dict[str, Any] = {"predicted": predicted, "code": process.exitcode}
        if len(files) == len(predicted) > 0:
            return result | {"real": [json.loads(file.read_text()) for file in files]}
        return result | {"output": (folder / "output").read_text()[-3000:]}


def quiet(folder: Path, function: Any, *args: Any) -> None:
    """Run a function with its output in a file."""
    with (folder / "output").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        function(*args)


def compared(name: str, strategy: str, library: Path) -> dict[str, Any]:
    """Return the result of a run under the limit; of one without the limit if the first one has run out of memory."""
    result = measured(name, strategy, library, limited=True)
    result["within"] = "real" in result
    if "real" in result or "limit of" not in result["output"]:
        return result
    return measured(name, strategy, library, limited=False) | {"within": False, "first": result["output"][-1500:]}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return what `memory.json` keeps of a run: peaks in bytes of the rank with the larger real peak, and their ratio.

    `steps` are the peaks of that rank's steps. `output` is the end of the output of a run that has failed.
    """
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], text=True, cwd=RESULTS.parent).strip()
    made = {"commit": commit, "machine": machine()}
    if "real" not in result:
        return made | {"output": result["output"][-300:]}
    fullest = max(result["real"], key=lambda peaks: peaks["training"])
    predicted = PeakMemory(**result["predicted"][result["real"].index(fullest)]).total
    peaks = {"predicted": predicted, "real": fullest["training"], "steps": fullest["steps"]}
    return peaks | {"error": round(predicted / fullest["training"] - 1, 4), "within": result["within"]} | made


def module_of(name: str, strategy: str) -> Module:
    """Return the module: with a declared loss for half of the networks under a pipeline."""
    interleaved = strategy == "hybrid_pipeline" and list(NETWORKS).index(name) % 4 < 2
    return (Declared if interleaved else Module)(name)


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ALL))
    parser.add_argument("--strategies", nargs="*", default=list(dict.fromkeys(STRATEGIES + MIXED + PARTED)))
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--until", default="24:00", help="time of day at which no new run begins")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a result")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    library = build(BUILD)
    for name, strategy in ((name, strategy) for names, columns in TABLES for name in names for strategy in columns):
        if name not in options.only or strategy not in options.strategies:
            continue
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        missing = strategy not in results.setdefault(name, {})
        if (options.again or missing) and time.strftime("%H:%M") < options.until:
            result = compared(name, strategy, library)
            results[name][strategy] = kept = summary(result)
            lines = [f"{json.dumps(name)}: {{\n{cells(results[name])}\n}}" for name in ALL if name in results]
            RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            shown = f"{kept['error']:+.1%}" if "error" in kept else kept["output"]
            print(name, strategy, shown, "" if result["within"] else "OUT OF MEMORY OR FAILED", flush=True)
    write_page(options.page)


def cells(results: dict[str, Any]) -> str:
    """Return the lines of `memory.json` for the runs of one network."""
    ordered = {strategy: results[strategy] for strategy in STRATEGIES + MIXED + PARTED if strategy in results}
    return ",\n".join(f"  {json.dumps(strategy)}: {json.dumps(run)}" for strategy, run in ordered.items())


def write_page(page: Path) -> None:
    """Write the page from all results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["# Predicted and real peak memory", "", TEXT.format(steps=STEPS, microbatches=MICROBATCHES).strip(), ""]
    for heading, (names, columns) in zip(HEADINGS, TABLES, strict=True):
        made: Counter[tuple[str, str]] = Counter()  # Number of runs, by commit and machine.
        text, table = described(results, names, columns, made)
        lines += [f"## {heading}", "", text, "", *table, ""]
        for (commit, machine_text), number in made.most_common():
            lines += [f"- {number} runs with commit {commit}. {machine_text}"]
        lines += [""]
    lines += ["`memory.json` has the commit of each run. Command: `python memory.py`, in `benchmarks/planning`."]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def described(
    results: dict[str, Any], names: Sequence[str], columns: Sequence[str], made: Counter[tuple[str, str]]
) -> tuple[str, list[str]]:
    """Return a text about the errors in a table, and the lines of the table. Count the runs in `made`."""
    rows, errors, failed, beyond = [], [], [], []
    for name in names:
        row = [name]
        for column in columns:
            cell, result = f"{name} under {column}", results.get(name, {}).get(column, {})
            if "real" not in result:
                row.append("failed" if result else "-")
                failed += [cell] if result else []
                continue
            made[result["commit"], result["machine"]] += 1
            errors.append(abs(result["error"]))
            beyond += [] if result["within"] else [cell]
            error = f"{result['error']:+.0%}" if abs(result["error"]) >= 0.005 else "0%"
            row.append(f"{result['predicted'] / 1e6:,.0f} / {result['real'] / 1e6:,.0f} ({error})")
        rows.append(f"| {' | '.join(row)} |")
    text = (
        f"{len(errors)} of {len(names) * len(columns)} runs have been measured: the mean error is "
        f"{statistics.mean(errors):.1%}, and the largest is {max(errors):.0%}. {len(errors) - len(beyond)} of "
        f"{len(errors)} end within the limit."
    )
    text += f" Out of memory: {', '.join(beyond)}." if beyond else ""
    text += f" Not measured, because the run failed for another reason: {', '.join(failed)}." if failed else ""
    return text, [f"| network | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns), *rows]


HEADINGS = "Small images in float32", "Small images in mixed precision", "Large images, whole and divided"
TEXT = """
Networks train {steps} steps on CPUs, every second one with Adam and the others with SGD with momentum: on one device,
and on two with `ddp`, `hybrid_pipeline` (two stages, {microbatches} microbatches, in the order 1F1B for half of the
networks and `gpipe` for the others), `parameter_server` (mode `sync`; a worker's memory, not a server's) and `spatial`
(two parts of each image). Small images have 64 x 64 pixels, in global batches of 16. Of large images a batch has 4 with
256 x 256 pixels, or 2 with 512 x 512 pixels and a class for each pixel. Each cell has the predicted and the real peak
in MB of the rank with the larger real peak, and a dash stands for a run that has not been made. Each run has a limit
of 1.1 times its predicted peak, for each rank its own.

In an earlier measurement 4 of 147 runs needed more, which has been repaired. Under `parameter_server` the first step of
alexnet and vgg11 compared the loss of the batch with the losses of two parts on a copy of the network. Under
`hybrid_pipeline` the first step of shufflenet_v2_x0_5 looked for layers that mix samples when all activations existed,
and resnest14d ran each batch as one microbatch.

**How a CPU's peak is counted.** Neither the resident memory, which contains libraries, freed pages and whatever Python
holds, nor a profiler. An allocator (`counting_allocator.cpp`) takes the place of torch's own in each process. It counts
the bytes of all CPU tensors, with those that exist only inside an operation and the workspaces of oneDNN, as the
allocator for a GPU does. It refuses an allocation that exceeds the limit, as `torch.OutOfMemoryError`. What exists
before the network is built (the data set in memory) is subtracted. The count lasts from the first to the last step of
the training. It has no messages of the parameter server that are not tensors. The predictions come from
`cnnstrategies.planning`, with bytes from a walk through the network with tensors without values. The cut of a pipeline
is the one that divides activations and training state most evenly.
"""

if __name__ == "__main__":
    main()
