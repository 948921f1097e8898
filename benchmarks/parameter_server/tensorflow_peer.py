"""Samples/s of parameter_server against TensorFlow's ParameterServerStrategy: 2 workers, 1 server, the same CNN.

TensorFlow is not a dependency of the project: `--tensorflow_python` names an interpreter that has it. Runs of all
alternate. `2 processes alone` train without any strategy, each for itself, at the same time: what the two frameworks'
convolutions alone would give. Ours with what `tune` finds (channels_last, and bf16 where that is allowed), theirs with
and without XLA and bf16.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fits import TIME_LIMIT, Fit, fit, sgd  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback, LightningModule, Trainer
from networks import resnet_like, vgg_like
from pieces import Pieces
from pieces import parser as options_of_pieces
from ranks import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.callbacks import ComputeSettings
from cnnstrategies.networks import BasicBlock
from cnnstrategies.strategies import ParameterServerStrategy

SIZE = 32
NETWORKS = {"ResNet-20": (resnet_like, 10), "VGG-11": (vgg_like, 100)}
HELP = """skipped: {reason}
TensorFlow belongs into an environment of its own:
    python3.11 -m venv tensorflow_environment
    tensorflow_environment/bin/pip install tensorflow-cpu
    python tensorflow_peer.py --tensorflow_python tensorflow_environment/bin/python"""
CHECKED = 4
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Run:
    """A run's speed and its losses in the order of their steps."""

    samples_per_second: float
    losses: list[float]


class Losses(Callback):
    """Writes the time and the loss of each batch of a rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Note the loss."""
        self.notes.append((args[1], float(outputs["loss"])))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was noted."""
        (self.folder / f"losses{os.getpid()}").write_text(json.dumps(self.notes))


class Task:
    """A network and its data, in files for both sides.

    Args:
        folder: Where the files go.
        make: Makes the network.
        classes: Number of classes.
        options: The command line's.
    """

    def __init__(self, folder: Path, make: Callable[[], nn.Module], classes: int, options: argparse.Namespace) -> None:
        self.folder, self.make, self.classes, self.options = folder, make, classes, options
        self.settings: dict[str, int] = {}
        self.samples = 2 * options.steps * options.batch_size
        torch.manual_seed(1)
        self.network = make()
        values: dict[str, Any] = {}
        (folder / "layers.json").write_text(json.dumps(describe(self.network, values)))
        np.savez(folder / "values.npz", **values)
        # A pattern for each class under noise, so that the loss can fall.
        targets = torch.randint(classes, (self.samples,))
        images = torch.randn(classes, 3, SIZE, SIZE)[targets] + torch.randn(self.samples, 3, SIZE, SIZE)
        images.permute(0, 2, 3, 1).contiguous().numpy().tofile(folder / "images")
        targets.numpy().tofile(folder / "targets")
        self.data = TensorDataset(images, targets)

    def loader(self) -> DataLoader[Any]:
        """Batches of the data."""
        return DataLoader(self.data, self.options.batch_size, shuffle=True, drop_last=True)

    def ours(self, mode: str, tuned: bool = False, bf16: bool = False) -> Run:
        """Train with our strategy."""
        arguments: dict[str, Any] = {"data_dispatch": "dynamic"} if mode == "async" else {}
        with tempfile.TemporaryDirectory() as folder:
            fitted = fit(
                lambda: ParameterServerStrategy(mode, start_method="fork", **arguments),
                self.make,
                self.classes,
                self.loader,
                callbacks=[Losses(Path(folder)), *([ComputeSettings(channels_last=True)] if tuned else [])],
                precision="bf16-mixed" if bf16 else "32-true",
            )
            return Run(fitted.samples_per_second(), read_losses(Path(folder)))

    def ours_alone(self) -> Run:
        """Train in two processes that know nothing of each other."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            processes = [multiprocessing.get_context("fork").Process(target=self._alone, args=(folder,)) for _ in "ab"]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                if process.exitcode != 0:
                    raise SystemExit(f"a process alone ended with {process.exitcode}; its message is above")
            notes = [json.loads(file.read_text()) for file in folder.glob("alone*")]
            fitted = Fit([ends for ends, _ in notes], [samples for _, samples in notes])
            return Run(fitted.samples_per_second(), read_losses(folder))

    def _alone(self, folder: Path) -> None:
        fitted = fit(lambda: "auto", self.make, self.classes, self.loader, workers=1, callbacks=[Losses(folder)])
        (folder / f"alone{os.getpid()}").write_text(json.dumps([fitted.ends[0], fitted.samples[0]]))

    def theirs(self, statistics: bool = True, xla: bool = False, bf16: bool = False) -> Run:
        """Train with TensorFlow's strategy."""
        self.settings = {"statistics": int(statistics), "xla": int(xla), "bf16": int(bf16)}
        names = ["worker", "worker", "ps", "chief"]
        places = dict(zip(range(4), free_ports(4), strict=True))
        cluster = {
            name: [places[index] for index, each in enumerate(names) if each == name] for name in dict.fromkeys(names)
        }
        with ExitStack() as stack:
            for name, index in (("worker", 0), ("worker", 1), ("ps", 0)):
                stack.enter_context(self._process(name, None, cluster, {"type": name, "index": index}))
            result = self.folder / "result.json"
            with self._process("coordinator", result, cluster, {"type": "chief", "index": 0}) as process:
                notes = self._result(process, result)
        return self._run([notes])

    def theirs_alone(self, xla: bool = False, bf16: bool = False) -> Run:
        """Train in two processes that know nothing of each other, with TensorFlow."""
        self.settings = {"statistics": 1, "xla": int(xla), "bf16": int(bf16)}
        files = [self.folder / f"alone{index}.json" for index in range(2)]
        with ExitStack() as stack:
            processes = [stack.enter_context(self._process("alone", file)) for file in files]
            results = [self._result(process, file) for process, file in zip(processes, files, strict=True)]
        return self._run(results)

    def check(self) -> float:
        """The largest relative difference of the losses of both sides, in steps on the same batch."""
        result = self.folder / "check.json"
        self.settings = {"statistics": 1, "xla": 0, "bf16": 0}
        with self._process("check", result, steps=CHECKED) as process:
            theirs = [loss for _, loss in self._result(process, result)]
        torch.manual_seed(1)
        network = self.make()
        optimizer = sgd(network.parameters())
        images, targets = self.data[: self.options.batch_size]
        ours = []
        for _ in range(CHECKED):
            loss = F.cross_entropy(network(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ours.append(loss.item())
        difference = max(abs(a - b) / a for a, b in zip(ours, theirs, strict=True))
        if difference > TOLERANCE:
            raise SystemExit(f"the two sides do not train the same network: losses {ours} here, {theirs} there")
        return difference

    def _run(self, notes: list[list[list[float]]]) -> Run:
        ends = [sorted(now for now, _ in each) for each in notes]
        counts = [[self.options.batch_size] * len(each) for each in ends]
        losses = [loss for _, loss in sorted(note for each in notes for note in each)]
        return Run(Fit(ends, counts).samples_per_second(), losses)

    @contextmanager
    def _process(
        self,
        role: str,
        result: Path | None,
        cluster: dict[str, list[str]] | None = None,
        task: dict[str, Any] | None = None,
        steps: int = 0,
    ) -> Iterator[subprocess.Popen[str]]:
        options = self.options
        defaults = sgd([nn.Parameter(torch.zeros(1))]).defaults
        arguments = {
            "folder": self.folder,
            "result": result or "",
            "steps": steps or options.steps * (2 if role == "coordinator" else 1),
            "batch_size": options.batch_size,
            "samples": self.samples,
            "size": SIZE,
            "learning_rate": defaults["lr"],
            "momentum": defaults["momentum"],
            "inter_op_threads": options.inter_op_threads,
            **self.settings,
        }
        command = [options.tensorflow_python, str(Path(__file__).with_name("tensorflow_side.py")), role]
        command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        if cluster is not None:
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        with (self.folder / f"output_{role}").open("a") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _result(self, process: subprocess.Popen[str], file: Path) -> list[list[float]]:
        if process.wait(TIME_LIMIT) != 0:
            output = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("output_*"))
            raise SystemExit(f"TensorFlow's side ended with {process.returncode}:\n{output}")
        results: list[list[float]] = json.loads(file.read_text())
        return results


def describe(module: nn.Module, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers as data, and their initial values as TensorFlow lays them out, by name, into ``values``."""
    name = f"v{len(values):03d}"
    match module:
        case nn.Sequential():
            return [layer for child in module for layer in describe(child, values)]
        case BasicBlock():
            body = [*describe(module.body1, values), {"kind": "relu"}, *describe(module.body2, values)]
            return [{"kind": "block", "stride": module.stride, "padding": module.padding, "body": body}]
        case nn.Conv2d(kernel_size=(3, 3), padding=(1, 1), groups=1):
            values[name + ".weight"] = module.weight.detach().permute(2, 3, 1, 0).numpy()
            if module.bias is not None:
                values[name + ".bias"] = module.bias.detach().numpy()
            return [{"kind": "convolution", "name": name, "stride": module.stride[0]}]
        case nn.BatchNorm2d():
            values[name + ".scale"], values[name + ".offset"] = (
                module.weight.detach().numpy(),
                module.bias.detach().numpy(),
            )
            return [{"kind": "norm", "name": name}]
        case nn.Linear():
            values[name + ".weight"] = module.weight.detach().T.numpy()
            values[name + ".bias"] = module.bias.detach().numpy()
            return [{"kind": "linear", "name": name}]
        case nn.ReLU():
            return [{"kind": "relu"}]
        case nn.MaxPool2d(kernel_size=2, stride=2):
            return [{"kind": "pool"}]
        case nn.AdaptiveAvgPool2d(output_size=1):
            return [{"kind": "average"}]
        case nn.Flatten():
            return [{"kind": "flatten"}]
    raise SystemExit(f"no TensorFlow counterpart of {module}: add one to describe() and to tensorflow_side.py")


def read_losses(folder: Path) -> list[float]:
    """The losses of all ranks, by step."""
    notes = [tuple(note) for file in folder.glob("losses*") for note in json.loads(file.read_text())]
    return [loss for _, loss in sorted(notes)]


def free_ports(count: int) -> list[str]:
    """Free addresses on the loopback device."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def version(python: str | None) -> str:
    """TensorFlow's version there; says how to get it and ends the script when there is none."""
    if python is None:
        raise SystemExit(HELP.format(reason="no --tensorflow_python"))
    try:
        command = [python, str(Path(__file__).with_name("tensorflow_side.py")), "version"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(HELP.format(reason=f"{python} cannot import tensorflow ({error})")) from error


def main() -> None:
    """Race for each network."""
    parser = options_of_pieces(__doc__)
    parser.add_argument("--tensorflow_python", help="an interpreter that has TensorFlow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of each worker")
    parser.add_argument("--batch_size", type=int, default=32, help="images of a worker's step")
    parser.add_argument("--inter_op_threads", type=int, default=3, help="of each TensorFlow process")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    tensorflow = version(options.tensorflow_python)
    torch.set_num_threads(1)
    pieces = Pieces(options)
    tasks: dict[str, Task] = {}
    with tempfile.TemporaryDirectory() as folder:

        def task(title: str) -> Task:
            if title not in tasks:
                (subfolder := Path(folder) / title).mkdir()
                tasks[title] = Task(subfolder, *NETWORKS[title], options)
            return tasks[title]

        def measure(name: str) -> Any:
            title, variant, *_ = name.split("/")
            if variant == "check":
                return task(title).check()
            run = VARIANTS[variant](task(title))
            print(name, f"{run.samples_per_second:.0f} samples/s", flush=True)
            return [run.samples_per_second, run.losses]

        names = [
            f"{title}/{variant}/{index}"
            for title in options.networks
            for index in range(options.rounds)
            for variant in list(VARIANTS)[:: -1 if index % 2 else 1]
        ]
        checks = [f"{title}/check" for title in options.networks]
        if pieces.measure([*checks, *names], measure):
            page(pieces, options, tensorflow)


VARIANTS: dict[str, Callable[[Task], Run]] = {
    "ParameterServerStrategy": lambda task: task.theirs(),
    "ParameterServerStrategy, XLA": lambda task: task.theirs(xla=True),
    "ParameterServerStrategy, no running statistics": lambda task: task.theirs(statistics=False),
    "ParameterServerStrategy, bf16": lambda task: task.theirs(bf16=True),
    "ParameterServerStrategy, XLA, bf16": lambda task: task.theirs(xla=True, bf16=True),
    "parameter_server, async, dynamic": lambda task: task.ours("async"),
    "parameter_server, async, dynamic, channels_last": lambda task: task.ours("async", tuned=True),
    "parameter_server, async, dynamic, channels_last, bf16": lambda task: task.ours("async", tuned=True, bf16=True),
    "parameter_server, sync, channels_last, bf16": lambda task: task.ours("sync", tuned=True, bf16=True),
    "TensorFlow, 2 processes alone": lambda task: task.theirs_alone(),
    "Lightning, 2 processes alone": lambda task: task.ours_alone(),
}


def page(pieces: Pieces, options: argparse.Namespace, tensorflow: str) -> None:
    """Write the page."""
    heads = ("samples/s: median (all)", "of ParameterServerStrategy's", "loss")
    rows: list[Sequence[str]] = [("network", "what", *heads)]
    ahead = []
    for title in options.networks:
        runs = {name: [pieces.known[f"{title}/{name}/{n}"] for n in range(options.rounds)] for name in VARIANTS}
        speeds = {name: [speed for speed, _ in each] for name, each in runs.items()}
        middle = {name: statistics.median(each) for name, each in speeds.items()}
        for name, each in runs.items():
            losses = [loss for _, loss in each]
            first, last = (
                statistics.fmean(x for run in losses for x in run[part]) for part in (slice(10), slice(-10, None))
            )
            shown = f"{middle[name]:.0f} ({', '.join(f'{speed:.0f}' for speed in speeds[name])})"
            ratio = f"{middle[name] / middle['ParameterServerStrategy']:.2f}"
            rows.append((title, name, shown, ratio, f"{first:.2f} to {last:.2f}"))
        for precision, has in (("in float32", False), ("with bf16", True)):
            our_speed, their_speed = (
                max(speed for name, speed in middle.items() if name.startswith(start) and ("bf16" in name) is has)
                for start in ("parameter_server", "ParameterServer")
            )
            ahead.append(f"{title} {precision}: {our_speed / their_speed:.2f} times")
    check = max(pieces.known[f"{title}/check"] for title in options.networks)
    report(
        Path(__file__).with_suffix(".md"),
        "Against TensorFlow's ParameterServerStrategy",
        f"{__doc__}\nA step is a batch of {options.batch_size} images of 32 x 32 for each worker, SGD with momentum, "
        f"from the same initial values; {options.rounds} runs of {options.steps} steps of each worker, without the "
        f"first. In {CHECKED} steps on one batch in float32 the losses of both differ by at most {check:.0e}. The loss "
        "is that of the first and the last 10 steps; the images are patterns under noise. TensorFlow's optimizer is "
        "one operation on the server for each variable, and its loop computes no accuracy; ours runs under Lightning's "
        "Trainer and does. As with Keras, TensorFlow's workers update BatchNorm's running statistics on the server in "
        "each step; ours average them when the epoch ends, hence the row without.\n\n"
        f"Speed of our best over TensorFlow's best: {'; '.join(ahead)}.\n\n"
        f"TensorFlow {tensorflow}, intra-op threads 1, inter-op threads {options.inter_op_threads}. "
        "Both strategies have more processes than the machine has cores.",
        rows,
    )


if __name__ == "__main__":
    main()
