"""Peak memory of a rank whose network is built in `__init__`, whole, and in `configure_model`, its own stage alone."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.strategies import HybridPipelineStrategy

LAYERS, CHANNELS, SAMPLES, STEPS = 16, 1024, 4, 1
PHASES = ("set-up", "steps", "saving", "resuming")


def network() -> nn.Module:
    """16 convolutions of 36 MiB each."""
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 1), *layers, nn.Flatten(), nn.Linear(CHANNELS * 4, 10))


class Module(LightningModule):
    """Trains it.

    Args:
        whole: Build it in ``__init__``.
    """

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.network = network() if whole else None

    def configure_model(self) -> None:
        """Build it, if it is not there."""
        if self.network is None:
            self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        assert self.network is not None
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """SGD with momentum, which is as large as the parameters."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Peaks(Callback):
    """Notes the peak of each phase, in MiB beyond what the process holds without a network.

    It is that of the memory which the system cannot give to others: pages of files it can, when memory is short.

    Args:
        resumes: Whether the set-up loads a checkpoint.
    """

    def __init__(self, resumes: bool) -> None:
        self.peaks: dict[str, int] = {}
        self._first = "resuming" if resumes else "set-up"
        self._before = self._peak = held()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, held())
            threading.Event().wait(0.002)

    def note(self, phase: str) -> None:
        """Note the peak of a phase that ends here."""
        self.peaks[phase], self._peak = self._peak - self._before, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up has ended."""
        self.note(self._first)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The steps have ended; ModelCheckpoint comes last."""
        self.note("steps")


def held() -> int:
    """Return this process's memory without file pages, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) // 1024


def run(whole: bool, stages: int, resumes: bool) -> None:
    """One rank: in the working directory it leaves its peaks, and rank 0 a checkpoint."""
    torch.set_num_threads(1)
    peaks = Peaks(resumes)
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=HybridPipelineStrategy(
            cuts=[str(LAYERS * stage // stages) for stage in range(1, stages)], microbatches=stages
        ),
        max_epochs=1 + resumes,
        callbacks=[peaks, ModelCheckpoint(dirpath=".", filename="saved", enable_version_counter=False)],
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    count = SAMPLES * STEPS
    data = TensorDataset(torch.randn(count, 3, 2, 2), torch.zeros(count, dtype=torch.int64))
    trainer.fit(Module(whole), DataLoader(data, SAMPLES), ckpt_path="saved.ckpt" if resumes else None)
    peaks.note("saving")
    Path(f"{resumes}{trainer.global_rank}.json").write_text(json.dumps(peaks.peaks))


def measured(whole: bool, stages: int, runs: int) -> list[dict[str, int]]:
    """The peaks of each rank in a run that saves, and perhaps in one that goes on from there."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        peaks_of_ranks: list[dict[str, int]] = [{} for _ in range(stages)]
        for resumes in (False, True)[:runs]:
            command = [sys.executable, __file__, "--rank", json.dumps([whole, stages, resumes])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            # What it holds in files is to be no memory, which the system's own directory may be.
            subprocess.run(command, cwd=folder, check=True, env=environment | {"TMPDIR": os.path.abspath(folder)})
            for rank, peaks in enumerate(peaks_of_ranks):
                peaks |= {**json.loads(Path(folder, f"{resumes}{rank}.json").read_text()), **peaks}
        return peaks_of_ranks


def main() -> None:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run(*arguments.rank)
        return
    size = sum(parameter.nbytes for parameter in network().parameters()) // 2**20
    rows = [("stages", "share of a stage, MiB", "built in", "rank", *(f"{phase}, MiB" for phase in PHASES))]
    for stages, whole, runs in ((2, True, 1), (2, False, 2), (4, False, 2)):
        for rank, peaks in enumerate(measured(whole, stages, runs)):
            figures = (str(peaks.get(phase, "")) for phase in PHASES)
            where = "`__init__`" if whole else "`configure_model`"
            rows.append((str(stages), str(size // stages), where, str(rank), *figures))
            print(rows[-1], flush=True)
    report(
        Path(__file__).with_suffix(".md"),
        "Memory of a rank that builds its own stage alone",
        f"{__doc__}\n{LAYERS + 1} convolutions and a linear layer, {size} MiB of float32, in equal stages; SGD with "
        f"momentum; a step of {SAMPLES} tiny images. Each figure is the peak of a phase beyond what the process "
        "held without a network, of memory that is no file's: such pages the system takes back when memory is short. "
        "In a step a stage holds its parameters, their gradients and the momentum. Where the network is whole, the "
        "set-up of rank 0 is the comparison before training, in float64; resuming was not measured.",
        rows,
    )


if __name__ == "__main__":
    main()
