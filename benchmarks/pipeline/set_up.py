"""Memory and time of the set-up under `hybrid_pipeline`, with two processes and automatic cuts.

The cuts are chosen by a profile, which rank 0 measures while rank 1 waits. The set-up ends when the first step begins.
Its largest memory is compared with the largest memory of one process that trains the same batch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from ranks import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.networks import UNet
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.rehearsal import rehearse
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning.measure_links import measure_cluster
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.predict import choose_layout
from cnnstrategies.strategies import HybridPipelineStrategy

STEPS, CLASSES = 2, 10
UNET_WIDTHS = (16, 32, 64, 128, 256)
# Function that makes the network, samples of a batch, and size of the images, by the network's name.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-50": (lambda: torchvision.models.resnet50(num_classes=CLASSES), 8, 224),
    "EfficientNet-B0": (lambda: torchvision.models.efficientnet_b0(num_classes=CLASSES), 8, 224),
    "ConvNeXt-T": (lambda: torchvision.models.convnext_tiny(num_classes=CLASSES), 8, 224),
    "DenseNet-121": (lambda: torchvision.models.densenet121(num_classes=CLASSES), 8, 224),
    "U-Net": (lambda: UNet(CLASSES, widths=UNET_WIDTHS), 4, 512),
}
# Functions, and the phases in which they run.
PHASES: tuple[tuple[Any, str], ...] = (
    (HybridPipelineStrategy.setup_optimizers, "optimizers"),
    (PlacedNetwork.__init__, "division"),
    (measure_cluster, "other"),
    (trace_open, "trace"),
    (profile, "profile"),
    (choose_layout, "search"),
    (rehearse, "comparison"),
)
TEXT = (
    "ResNet-50, EfficientNet-B0, ConvNeXt-T and DenseNet-121 train batches of 8 images of 224 x 224, and a U-Net with "
    f"{UNET_WIDTHS[0]} to {UNET_WIDTHS[-1]} channels batches of 4 images of 512 x 512; SGD with momentum. Memory is "
    "the largest resident memory of a process, with the libraries that it has imported. Seconds and processor seconds "
    "are those of rank 0 from the start of the script, without imports, to the first step. The columns from `build` on "
    "are processor seconds of a phase. The target is a ratio of at most 1.05 and 15 seconds on two idle cores. On a "
    "busy machine the seconds say little, and the profile measures smaller batches."
)
SHOWN = ("build", "optimizers", "trace", "profile", "search", "division", "comparison", "other", "first step")


class Phases:
    """Seconds, processor seconds and largest memory of the phases of a run. A phase may contain others.

    Attributes:
        phases: For each phase its seconds, its processor seconds, and its largest memory in MB.
    """

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {}
        self._stack = ["other"]
        self._last = time.perf_counter(), time.process_time()

    def note(self) -> None:
        """Add the time since the last call, and the largest memory, to the current phase."""
        now = time.perf_counter(), time.process_time()
        phase = self.phases.setdefault(self._stack[-1], [0.0, 0.0, 0.0])
        phase[:2] = [phase[index] + now[index] - self._last[index] for index in range(2)]
        phase[2] = max(phase[2], peak())
        self._last = now

    def begin(self, name: str) -> None:
        """Begin a phase that lasts until another phase begins."""
        self.note()
        self._stack = [name]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context in which time and memory count for a phase."""
        self.note()
        self._stack.append(name)
        try:
            yield
        finally:
            self.note()
            self._stack.pop()

    def watch(self, function: Any, phase: str) -> None:
        """Count a function for a phase, in all modules of the package that import it, or in its class."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        owners: list[Any] = [module for name, module in sys.modules.items() if name.startswith("cnnstrategies")]
        owners += [HybridPipelineStrategy, PlacedNetwork]
        for owner in owners:
            if getattr(owner, function.__name__, None) is function:
                setattr(owner, function.__name__, watched)


def peak() -> float:
    """Return this process's largest memory since the last call, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    size = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
    Path("/proc/self/clear_refs").write_text("5")
    return size


class Note(Callback):
    """Notes the phases of a fit, and writes them to a file."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up has ended."""
        self.phases.begin("first step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """A step has ended."""
        self.phases.begin("next step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the phases."""
        notes = {"phases": self.phases.phases, "cut": self._cut(trainer) if trainer.world_size > 1 else None}
        Path(f"{trainer.global_rank}.json").write_text(json.dumps(notes))

    def _cut(self, trainer: Trainer) -> str:
        """Return where the network is cut."""
        return next(text for name, text in trainer.strategy.panel_rows(None) if name == "stage 1").split(" to ")[0]


Note.__module__ = "cnnstrategies.note"  # Otherwise the hooks would count as a user's, which may look at weights.


class Module(LightningModule):
    """Trains a network with the cross-entropy.

    Args:
        name: Name of the network.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = NETWORKS[name][0]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def run(name: str, devices: int) -> None:
    """Train as one rank, which leaves its phases in the working directory."""
    torch.set_num_threads(1)
    seed_everything(1)
    phases = Phases()
    for part in PHASES:
        phases.watch(*part)
    _, samples, size = NETWORKS[name]
    with phases.phase("build"):
        module = Module(name)
    targets = (samples * STEPS, size, size) if name == "U-Net" else (samples * STEPS,)
    data = TensorDataset(torch.randn(samples * STEPS, 3, size, size), torch.randint(CLASSES, targets))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else HybridPipelineStrategy(),
        max_epochs=1,
        callbacks=[Note(phases)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, samples))


def measured(name: str, devices: int) -> list[dict[str, Any]]:
    """Return what each rank has noted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", json.dumps([name, devices])]
        paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, check=True, env=os.environ | paths, stdout=subprocess.DEVNULL)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(devices)]


def set_up(phases: dict[str, list[float]], index: int) -> list[float]:
    """Return the figures of all phases before the first step."""
    return [figures[index] for name, figures in phases.items() if not name.endswith(" step")]


def main() -> None:
    """Measure in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    if options.run is not None:
        run(*options.run)
        return
    memory = ["one process, training", "set-up, rank 0", "ratio", "set-up, rank 1", "training, rank 0", "rank 1"]
    rows = [["network", *(f"{column}, MB" if column != "ratio" else column for column in memory), "seconds", "of them"]]
    rows[0][-1:] = ["processor seconds", *SHOWN, "stage 1 begins at"]
    for name in options.networks:
        (alone,) = measured(name, 1)
        ranks = measured(name, 2)
        most = max(figures[2] for figures in alone["phases"].values())
        peaks = [max(set_up(rank["phases"], 2)) for rank in ranks]
        later = [max(rank["phases"][phase][2] for phase in ("first step", "next step")) for rank in ranks]
        first = ranks[0]["phases"]
        others = [value for phase, value in first.items() if phase not in SHOWN[:-2] and not phase.endswith(" step")]
        first["other"] = [sum(value[index] for value in others) for index in range(3)]
        figures = [most, peaks[0], peaks[0] / most, peaks[1], *later]
        row = [name, *(f"{figure:,.0f}" if figure > 10 else f"{figure:.2f}" for figure in figures)]
        spent = [sum(set_up({k: v for k, v in first.items() if k in SHOWN}, index)) for index in range(2)]
        row += [f"{seconds:.1f}" for seconds in spent]
        rows.append([*row, *(f"{first.get(phase, [0, 0])[1]:.2f}" for phase in SHOWN), ranks[0]["cut"]])
        # The page grows with each network, because a run takes long on a busy machine.
        report(
            options.page,
            "Memory and time of a set-up",
            f"{__doc__}\n{TEXT}",
            rows,
        )


if __name__ == "__main__":
    main()
