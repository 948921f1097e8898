"""Checks on a real GPU. run.py runs each check in a process of its own, in this order, and writes the page.

Each check yields descriptions of what it has tried with the results, and raises an error if a result is wrong.
"""

import csv
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.resnet import BasicBlock, ResNet

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import SamplesPerSecond
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ACCELERATOR = "gpu" if ON_GPU else "cpu"
# On a CPU the checks are a rehearsal with the smallest sizes.
EPOCHS, LEAST, SIZE, BATCH, STEPS = (8, 0.9, 224, 256, 60) if ON_GPU else (1, 0.1, 32, 16, 4)
resnet18 = torchvision.models.resnet18 if ON_GPU else partial(ResNet, BasicBlock, [1, 1, 1, 1])
RANKS_LIMIT = 300  # Time limit of a run with several ranks in seconds.
# Strategies and modes whose weights differ from those of one process, because gradients are compressed, or because
# workers make their own steps.
COMPRESSED, OWN_STEPS = ("ddp_fp16", "ddp_bf16", "ddp_powersgd"), ("async", "ssp", "local")
# Ranks, strategies and options whose peaks are predicted.
PREDICTED: list[tuple[int, str, dict[str, Any]]] = [
    (1, "auto", {}),
    (2, "ddp", {}),
    (2, "parameter_server", {}),
    (2, "hybrid_pipeline", {"replicas": [1, 1]}),
    (3, "hybrid_pipeline", {"replicas": [2, 1]}),
    (2, "spatial", {"parts": 2}),
    (1, "auto", {"precision": "bf16-mixed"}),
    (2, "spatial", {"parts": 2, "precision": "bf16-mixed"}),
]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
Rows = Iterator[tuple[str, str]]


def staging() -> Rows:
    """Check the parameter server's copies between host and device."""
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/paramserver/test_staging.py"]
    yield "tests/paramserver/test_staging.py", _run(tests).strip().splitlines()[-1]


def fits() -> Rows:
    """Check that the quickstart learns its digits under each strategy and precision."""
    cases = [("auto", "32-true"), ("parameter_server", "32-true"), ("auto", "bf16-mixed"), ("fsdp", "32-true")]
    cases += [("auto", "16-mixed"), ("parameter_server", "bf16-mixed"), ("parameter_server", "16-mixed")]
    if not ON_GPU:
        cases = [case for case in cases if case[0] != "fsdp" and case[1] != "16-mixed"]  # Both need a GPU.
    with ThreadPoolExecutor(len(cases) if ON_GPU else 1) as pool:
        yield from pool.map(_quickstart, cases)


def _quickstart(case: tuple[str, str]) -> tuple[str, str]:
    strategy, precision = case
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--trainer.strategy={strategy}", f"--trainer.precision={precision}", "--trainer.devices=1"]
        words += [f"--trainer.accelerator={ACCELERATOR}", f"--trainer.max_epochs={EPOCHS}"]
        words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"]
        _run([sys.executable, "-m", "cnnstrategies", "fit", "--config=quickstart", *words])
        (file,) = Path(folder).rglob("metrics.csv")
        with file.open(newline="") as lines:
            accuracy = [float(row["val_acc"]) for row in csv.DictReader(lines) if row.get("val_acc")][-1]
    assert accuracy >= LEAST, f"{strategy} in {precision} has learned to {accuracy}"
    return f"quickstart, {strategy}, {precision}", f"val_acc {accuracy:.3f} after {EPOCHS} epochs"


class NoWaits(Callback):
    """Raises an error if the host waits for the device in a step, from the fourth step on."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Let torch raise errors, except in an epoch's first step, whose loss is read.

        See ``torch.cuda.set_sync_debug_mode``.
        """
        if ON_GPU and index and trainer.global_step > 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        """Let the host wait again: the step is over."""
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def waits() -> Rows:
    """Check that no step waits for the device.

    The parameter server comes first, because its ranks must be forked from a process that has not used CUDA.
    """
    strategies: dict[str, Callable[[], Any]] = {
        "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
        "auto": lambda: "auto",
        "ddp": lambda: "ddp",
        "hybrid_pipeline [1]": lambda: HybridPipelineStrategy(replicas=[1], microbatches=2),
    }
    for name, make in strategies.items():
        fit(make(), resnet18(num_classes=10), watched=True)
        yield f"ResNet-18, {name}", "the host does not wait in a step" if ON_GPU else "has run"


def speed() -> Rows:
    """Measure a compiled ResNet-50 in channels_last and bf16 with fit and with plain torch, and a loader alone."""
    make = torchvision.models.resnet50 if ON_GPU else resnet18
    options: dict[str, Any] = {"channels_last": True, "compile_backend": "inductor" if ON_GPU else None}
    for _ in range(2 if ON_GPU else 1):
        ours = fit("auto", make(), "bf16-mixed", classes=1000, **options)
        yield "fit, images/s", f"{ours:,.0f}"
        yield "the same loop in plain torch, images/s", f"{plain(make()):,.0f}"
    workers = min(8, os.cpu_count() or 1) if ON_GPU else 0
    module = SyntheticDataModule(20 * BATCH, 10, SIZE, batch_size=BATCH, num_workers=workers)
    module.setup("fit")
    start = time.monotonic()
    count = sum(len(images) for images, _ in module.train_dataloader())
    yield f"a loader of {workers} processes, images/s", f"{count / (time.monotonic() - start):,.0f}"


def several() -> Rows:
    """Measure pipelines and DDP over NCCL on several GPUs; a rehearsal uses processes on the CPU."""
    devices = torch.cuda.device_count() if ON_GPU else 2
    for replicas in ([1, 1], [2, 1]):
        for schedule in ("1f1b", "gpipe"):
            if sum(replicas) <= devices:
                strategy = HybridPipelineStrategy(replicas=replicas, schedule=schedule, start_method="spawn")
                rate = fit(strategy, resnet18(num_classes=10), devices=sum(replicas))
                yield f"ResNet-18, hybrid_pipeline {replicas}, {schedule}, images/s", f"{rate:,.0f}"
    if devices > 1:
        rate = fit("ddp_spawn", resnet18(num_classes=10), devices=2)
        yield "ResNet-18, ddp on 2, images/s", f"{rate:,.0f}"


def one_card() -> Rows:
    """Check that ranks on one card learn the weights of one process under each strategy, over NCCL in float64."""
    with tempfile.TemporaryDirectory() as folder:
        alone = _ranks(1, "auto", folder)
        cases: list[tuple[int, str, dict[str, Any]]] = [
            (2, "ddp", {}),
            (2, "ddp_balanced", {}),
            (3, "spatial", {"parts": 3}),
            (4, "spatial", {"parts": 2}),
            *((2, name, {}) for name in COMPRESSED),
            (2, "parameter_server", {}),
            *((2, "parameter_server", {"mode": mode}) for mode in OWN_STEPS),
            (2, "hybrid_pipeline", {"replicas": [1, 1]}),
            (2, "hybrid_pipeline", {"replicas": [1, 1], "cuts": ["layer2"], "schedule": "gpipe"}),
            (3, "hybrid_pipeline", {"replicas": [2, 1], "cuts": ["layer2"]}),
            (3, "hybrid_pipeline", {"replicas": [1, 2], "cuts": ["layer2"]}),
            (3, "hybrid_pipeline", {"replicas": [1, 1, 1], "cuts": ["layer1", "layer3"]}),
            (2, "hybrid_pipeline", {"replicas": [1, 1], "precision": "bf16-mixed", "no_waits": True}),
        ]
        cases += [(2, "parameter_server", {"precision": "16-mixed"})] if ON_GPU else []  # Needs a GPU.
        with ThreadPoolExecutor(4 if ON_GPU else 1) as pool:
            yield from pool.map(lambda case: _compared(alone, *case), cases)


def divided() -> Rows:
    """Check that ranks on one card with parts of the images learn the weights of one process, over NCCL in float64.

    The network has batch normalisation, whose statistics are those of the whole images.
    """
    options: dict[str, Any] = {"batch_norm": True, "channels_last": True, "accumulate": 2, "clip": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        alone = _ranks(1, "auto", folder, **options)
    cases: list[dict[str, Any]] = [{**options, "parts": 2}, {**options, "parts": 3}]
    cases += [{"batch_norm": True, "parts": 2, "precision": "bf16-mixed", "no_waits": True}]
    cases += [{**options, "parts": 2, "precision": "16-mixed"}] if ON_GPU else []  # Needs a GPU.
    with ThreadPoolExecutor(4 if ON_GPU else 1) as pool:
        yield from pool.map(lambda case: _compared(alone, case["parts"], "spatial", case), cases)


def accumulated() -> Rows:
    """Check that ranks on one card accumulate and clip gradients as one process, over NCCL in float64."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"accumulate": 2, "clip": 0.5}
        alone = _ranks(1, "auto", folder, **options)
        layouts = ([1, 1], ["layer2"]), ([2, 1], ["layer2"]), ([1, 2], ["layer2"]), ([1, 1, 1], ["layer1", "layer3"])
        cases = [{"replicas": replicas, "cuts": cuts, **options} for replicas, cuts in layouts]
        cases += [{"replicas": [1, 1], "precision": "bf16-mixed", "no_waits": True}]
        cases += [{"replicas": [1, 1], "precision": "16-mixed"}] if ON_GPU else []  # Needs a GPU.
        with ThreadPoolExecutor(4 if ON_GPU else 1) as pool:
            yield from pool.map(lambda case: _compared(alone, sum(case["replicas"]), "hybrid_pipeline", case), cases)


def _compared(alone: dict[str, torch.Tensor], ranks: int, strategy: str, options: dict[str, Any]) -> tuple[str, str]:
    texts = [name if value is True else str(value) for name, value in options.items()]
    description = f"{ranks} ranks on one card, {' '.join([strategy, *texts])}"
    with tempfile.TemporaryDirectory() as folder:
        learned = _ranks(ranks, strategy, folder, **options)
    if "precision" in options:
        return description, "has run"
    limit = 0.1 if strategy in COMPRESSED or options.get("mode") in OWN_STEPS else 1e-9
    return f"{description}, float64", f"{_apart(alone, learned, description, limit):.1e} from one process"


def _apart(
    alone: dict[str, torch.Tensor], learned: dict[str, torch.Tensor], description: str, limit: float = 1e-9
) -> float:
    """Return the largest difference from the weights of one process, and fail if it is more than the limit.

    The default of the limit allows rounding in float64.
    """
    apart = max(float((learned[name] - value).double().abs().max()) for name, value in alone.items())
    assert apart < limit, f"{description}: {apart} away from one process"
    return apart


def own_stage() -> Rows:
    """Check that a network built in ``configure_model`` is on each rank's card only with its own stage.

    The network must also learn the same weights as on one process.
    """
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        alone = _ranks(1, "auto", whole, held=whole)
        learned = _ranks(2, "hybrid_pipeline", parts, held=parts, replicas=[1, 1], cuts=["layer3"])
        taken = {folder: [int(file.read_text()) for file in Path(folder).glob("*.bytes")] for folder in (whole, parts)}
    apart = _apart(alone, learned, "configure_model")
    mib = {folder: ", ".join(f"{size / 2**20:.0f}" for size in sorted(sizes)) for folder, sizes in taken.items()}
    assert sum(taken[parts]) <= 1.1 * sum(taken[whole]), mib
    yield "2 ranks on one card, hybrid_pipeline [1, 1], configure_model, float64", f"{apart:.1e} from one process"
    yield "MiB of the card before the first step, two ranks and one process", f"{mib[parts]}; {mib[whole]}"


def compiled() -> Rows:
    """Check that compiled stages, over NCCL in float64, learn the same weights as one process without compilation."""
    with tempfile.TemporaryDirectory() as folder:
        alone = _ranks(1, "auto", folder)
        common: dict[str, Any] = {"compile": "inductor" if ON_GPU else "eager"}
        stages = {**common, "replicas": [1, 1]}
        cases: list[tuple[int, str, dict[str, Any]]] = [(2, "hybrid_pipeline", stages)]
        if ON_GPU:
            cases += [(2, "hybrid_pipeline", {**stages, "precision": "bf16-mixed"})]
            cases += [(3, "hybrid_pipeline", {**common, "replicas": [2, 1], "cuts": ["layer2"]})]
            cases += [(2, "parameter_server", common)]
        for case in cases:
            yield _compared(alone, *case)


def peaks() -> Rows:
    """Compare each rank's predicted peak memory with the real one, with several ranks on one card.

    The precision is float64 unless the options say something else.
    """
    for ranks, strategy, options in PREDICTED:
        with tempfile.TemporaryDirectory() as folder:
            _ranks(ranks, strategy, folder, peaks=folder, **options)
            pairs = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        assert all(predicted for predicted, _ in pairs), f"{strategy} has no predicted peaks: {pairs}"
        description = f"{ranks} ranks on one card, {' '.join([strategy, *map(str, options.values())])}"
        yield description, "; ".join(_peak(rank, *pair) for rank, pair in enumerate(pairs))


def _peak(rank: int, predicted: int, real: int) -> str:
    text = f"rank {rank}: predicted {predicted / 2**20:,.0f} MiB"
    return f"{text}, real {real / 2**20:,.0f} MiB ({predicted / real - 1:+.0%})" if real else text


def lost() -> Rows:
    """Check that the other ranks soon say that a rank is killed under NCCL, and name the rank in a pipeline."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("hybrid_pipeline [1, 1]", "PeerError: .*(rank 1)", {"replicas": [1, 1], "cuts": ["layer2"]}),
        ("spatial", "DivergedError: rank 0 waits in ", {"parts": 2}),
    ]
    for name, pattern, options in cases:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LOST"] = f"{folder}/lost"
            (code, text), _ = _ended(2, name.partition(" ")[0], folder, lost=True, **options)
            took = time.time() - float(Path(os.environ["LOST"]).read_text())
        named = [line for line in text.splitlines() if re.search(pattern, line)]
        assert named, text[-3000:]
        assert code, "rank 0 has ended without an error"
        assert took < 120, f"{took:.0f} s"
        yield f"2 ranks on one card, {name}, rank 1 is killed", f"{named[-1]} (ended after {took:.1f} s)"


def _ranks(ranks: int, strategy: str, folder: str, **options: Any) -> dict[str, torch.Tensor]:
    for code, text in _ended(ranks, strategy, folder, **options):
        assert not code, f"{strategy} {options}: a rank has ended with {code}:\n{text[-3000:]}"
    learned: dict[str, torch.Tensor] = torch.load(f"{folder}/learned.pt")
    return learned


def _ended(ranks: int, strategy: str, folder: str, **options: Any) -> list[tuple[int, str]]:
    """Return the exit code and output of each rank of one_card.py; the code is 124 if the rank reaches the limit."""
    words = [sys.executable, "-m", "tests.gpu.one_card", strategy, json.dumps(options)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"RANKS": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    if ranks > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        common |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(ranks):
        of_rank = {"NODE_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"} if ranks > 1 else {}
        processes.append(
            subprocess.Popen(
                [*words, f"{folder}/learned.pt"],
                env={**os.environ, **common, **of_rank},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    with ThreadPoolExecutor(ranks) as pool:

        def end(process: subprocess.Popen[str]) -> tuple[int, str]:
            try:
                text = process.communicate(timeout=RANKS_LIMIT)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                return 124, f"still runs after {RANKS_LIMIT} s\n" + process.communicate()[0]
            return process.returncode, text

        return list(pool.map(end, processes))


# Checks that may run at the same time, because they measure no times.
TOGETHER = (staging, fits, waits, one_card, divided, accumulated, own_stage, compiled, peaks, lost)
ALONE = (speed, several)


def data(classes: int, watched: bool = False) -> DataLoader[Any]:
    """Return a loader with the same batch for each step, so that measurements do not include loading."""
    batch = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH) % classes
    return DataLoader(Same(batch, watched), batch_size=None, pin_memory=ON_GPU)


class Same(Dataset[Any]):
    """A dataset that repeats one batch for all steps.

    Args:
        batch: Images and targets.
        watched: Raise an error if the host waits for the device, from an epoch's fourth batch to its last, in the
            order of requests. A callback cannot do this: the parameter server would check whether the callback has
            changed weights, and this check waits for the device.
    """

    def __init__(self, batch: Any, watched: bool) -> None:
        self.batch = batch
        self.watched = watched and ON_GPU
        self.requests = 0

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        if self.watched:
            torch.cuda.set_sync_debug_mode("error" if 2 < self.requests % STEPS < STEPS - 1 else "default")
            self.requests += 1
        return self.batch


def trainer_of(strategy: Any, precision: Any, callbacks: list[Callback], **options: Any) -> Trainer:
    """Return a trainer of two epochs that shows and writes nothing."""
    return Trainer(
        accelerator=ACCELERATOR,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )


def fit(
    strategy: Any,
    network: nn.Module,
    precision: Any = "32-true",
    devices: int = 1,
    classes: int = 10,
    watched: bool = False,
    **options: Any,
) -> float:
    """Train two epochs, and return the images per second without the first step."""
    trainer = trainer_of(strategy, precision, [SamplesPerSecond()], devices=devices)
    trainer.fit(ImageClassifier(network, classes, SGD, **options), data(classes, watched))
    return float(trainer.callback_metrics["samples_per_s"])


def plain(network: nn.Module) -> float:
    """Return the images per second of a training loop like that of timm's and torchvision's scripts."""
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


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done.stdout


if __name__ == "__main__":
    check = next(candidate for candidate in (*TOGETHER, *ALONE) if candidate.__name__ == sys.argv[1])
    for row in check():
        print(json.dumps(row), flush=True)
