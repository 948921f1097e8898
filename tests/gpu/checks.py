"""What to see on a real GPU, each in a process of its own; run.py runs them in this order and writes the page.

Each check yields what it has tried and what came of it, and raises where that is wrong.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import SamplesPerSecond
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.pipeline.stage import divide_by_names
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy
from cnnstrategies.strategies.hybrid_pipeline.comparison import compare

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ACCELERATOR = "gpu" if ON_GPU else "cpu"
# On a CPU it is a rehearsal, of the smallest that there is.
EPOCHS, LEAST, SIZE, BATCH, STEPS = (8, 0.9, 224, 256, 60) if ON_GPU else (1, 0.1, 32, 16, 4)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
Rows = Iterator[tuple[str, str]]


def staging() -> Rows:
    """The parameter server's copies between host and device."""
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/paramserver/test_staging.py"]
    yield "tests/paramserver/test_staging.py", _run(tests).strip().splitlines()[-1]


def fits() -> Rows:
    """The quickstart, which learns its digits whatever trains it."""
    cases = [("auto", "32-true"), ("parameter_server", "32-true"), ("auto", "bf16-mixed"), ("fsdp", "32-true")]
    cases += [("auto", "16-mixed"), ("parameter_server", "bf16-mixed")]
    for strategy, precision in cases:
        if not ON_GPU and (strategy == "fsdp" or precision == "16-mixed"):
            continue  # Neither has a CPU.
        with tempfile.TemporaryDirectory() as folder:
            words = [f"--trainer.strategy={strategy}", f"--trainer.precision={precision}", "--trainer.devices=1"]
            words += [f"--trainer.accelerator={ACCELERATOR}", f"--trainer.max_epochs={EPOCHS}"]
            words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"]
            _run([sys.executable, "-m", "cnnstrategies", "fit", "--config=quickstart", *words])
            (file,) = Path(folder).rglob("metrics.csv")
            with file.open(newline="") as lines:
                accuracy = [float(row["val_acc"]) for row in csv.DictReader(lines) if row.get("val_acc")][-1]
        assert accuracy >= LEAST, f"{strategy} in {precision} has learned to {accuracy}"
        yield f"quickstart, {strategy}, {precision}", f"val_acc {accuracy:.3f} after {EPOCHS} epochs"


class NoWaits(Callback):
    """Raises where the host waits for the device, from the fourth step on."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """torch warns or raises in this mode; see ``torch.cuda.set_sync_debug_mode``."""
        if ON_GPU and trainer.global_step > 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        """What follows is not the step."""
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def waits() -> Rows:
    """No step waits for the device."""
    strategies: dict[str, Callable[[], Any]] = {
        "auto": lambda: "auto",
        "ddp": lambda: "ddp",
        "hybrid_pipeline [1]": lambda: HybridPipelineStrategy(replicas=[1]),
        "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
    }
    for name, make in strategies.items():
        fit(make(), torchvision.models.resnet18(num_classes=10), callbacks=[NoWaits()])
        yield f"ResNet-18, {name}", "the host does not wait in a step" if ON_GPU else "has run"


def lazy_loading() -> Rows:
    """Whether the first launch of a kernel waits for one that runs on another stream."""
    program = (
        "import time, torch; x = torch.randn(1024, device='cuda'); torch.cuda.synchronize()\n"
        "with torch.cuda.stream(torch.cuda.Stream()): torch.cuda._sleep(2_000_000_000)\n"
        "start = time.monotonic(); torch.special.i0e(x); launched = time.monotonic() - start\n"
        "torch.cuda.synchronize(); print(f'{launched:.3f} s, the other kernel {time.monotonic() - start:.3f} s')"
    )
    for loading in ("LAZY", "EAGER") if ON_GPU else ():
        took = _run([sys.executable, "-c", program], CUDA_MODULE_LOADING=loading)
        yield f"CUDA_MODULE_LOADING={loading}: a kernel's first launch", took.strip()


def comparison() -> Rows:
    """The comparison before training refuses no network that is right."""
    network = torchvision.models.resnet18(num_classes=10)
    for _ in range(10 if ON_GPU else 1):
        compare(divide_by_names(network, ["layer2"]), torch.randn(8, 3, 32, 32), torch.device(DEVICE, 0))
    yield "ResNet-18 of 32 x 32, stages against the whole", "equal, ten times" if ON_GPU else "equal, once"


def speed() -> Rows:
    """ResNet-50 in channels_last and bf16, compiled: ours, a loop of plain torch, and what the loader gives."""
    make = torchvision.models.resnet50 if ON_GPU else torchvision.models.resnet18
    options: dict[str, Any] = {"channels_last": True, "compile_backend": "inductor" if ON_GPU else None}
    ours = fit("auto", make(), "bf16-mixed", classes=1000, **options)
    yield "fit, images/s", f"{ours:,.0f}"
    yield "the same loop in plain torch, images/s", f"{plain(make()):,.0f}"
    workers = min(8, os.cpu_count() or 1) if ON_GPU else 0
    module = SyntheticDataModule(STEPS * BATCH // 4, 10, SIZE, batch_size=BATCH, num_workers=workers)
    module.setup("fit")
    start = time.monotonic()
    count = sum(len(images) for images, _ in module.train_dataloader())
    yield f"a loader of {workers} processes, images/s", f"{count / (time.monotonic() - start):,.0f}"


def several() -> Rows:
    """Pipelines and DDP over NCCL, where there are several GPUs; as processes on the CPU in a rehearsal."""
    devices = torch.cuda.device_count() if ON_GPU else 2
    for replicas in ([1, 1], [2, 1]):
        for schedule in ("1f1b", "gpipe"):
            if sum(replicas) <= devices:
                strategy = HybridPipelineStrategy(replicas=replicas, schedule=schedule, start_method="spawn")
                rate = fit(strategy, torchvision.models.resnet18(num_classes=10), devices=sum(replicas))
                yield f"ResNet-18, hybrid_pipeline {replicas}, {schedule}, images/s", f"{rate:,.0f}"
    if devices > 1:
        rate = fit("ddp_spawn", torchvision.models.resnet18(num_classes=10), devices=2)
        yield "ResNet-18, ddp on 2, images/s", f"{rate:,.0f}"


CHECKS = (staging, fits, waits, lazy_loading, comparison, speed, several)


def data(classes: int) -> DataLoader[Any]:
    """The same batch for each step of an epoch, so that nothing is measured of a loader."""
    batch = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH) % classes
    return DataLoader(Same(batch), batch_size=None, pin_memory=ON_GPU)


class Same(Dataset[Any]):
    """A batch as often as there are steps.

    Args:
        batch: Images and targets.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return self.batch


def fit(
    strategy: Any,
    network: nn.Module,
    precision: Any = "32-true",
    callbacks: list[Callback] | None = None,
    devices: int = 1,
    classes: int = 10,
    **options: Any,
) -> float:
    """Train two epochs, and tell the images of a second of all but the first step."""
    trainer = Trainer(
        accelerator=ACCELERATOR,
        devices=devices,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*(callbacks or ()), SamplesPerSecond()],
    )
    trainer.fit(ImageClassifier(network, classes, SGD, **options), data(classes))
    return float(trainer.callback_metrics["samples_per_s"])


def plain(network: nn.Module) -> float:
    """Images of a second of the loop that timm's and torchvision's scripts have."""
    network = network.to(DEVICE, memory_format=torch.channels_last)
    optimizer = SGD(network.parameters())
    compiled = torch.compile(network) if ON_GPU else network
    loader = data(1000)
    start, count = 0.0, 0
    for _ in range(2):
        for index, (images, targets) in enumerate(loader):
            images = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = nn.functional.cross_entropy(compiled(images), targets.to(DEVICE, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(images)
            if index in (0, len(loader) - 1) and ON_GPU:
                torch.cuda.synchronize()
            if not index:
                start, count = time.monotonic(), 0
    return count / (time.monotonic() - start)


def _run(words: list[str], **variables: str) -> str:
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done.stdout


if __name__ == "__main__":
    check = next(one for one in CHECKS if one.__name__ == sys.argv[1])
    for row in check():
        print(json.dumps(row), flush=True)
