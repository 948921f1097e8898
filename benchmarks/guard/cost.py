"""Cost of the guard: its processor time as a share of that of a training step, under five strategies.

    python benchmarks/guard/cost.py [--steps 100]

ResNet-20 trains on 32 images of 32 x 32 in float32, on two processes, or three under the pipeline. Counted is the
processor time of the main thread inside of the guard's hooks: in a step between two checks, and in a check, which comes
every 100 steps. The share is that of a step and a hundredth of a check in the processor time of all threads in a step
without the guard. All times are means over the processes and the steps; other work on the machine changes times, and
hardly their ratio. The goal is 1 %.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import Guard
from cnnstrategies.networks import SmallResNet
from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    SpatialStrategy,
)

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
from ranks import report

FIRST = 5  # Steps before time is counted.
USUAL = 100  # Usual number of steps from one check to the next.
HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
# For each strategy: number of processes, samples in a batch of the loader, and the strategy.
STRATEGIES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "ddp": (2, 16, lambda: DDPStrategy(start_method="fork")),
    "ddp_balanced": (2, 16, lambda: BalancedDDPStrategy(shares="equal", start_method="fork")),
    "hybrid_pipeline, replicas [2, 1]": (
        3,
        32,
        lambda: HybridPipelineStrategy(replicas=[2, 1], cuts=["group2"], microbatches=4, start_method="fork"),
    ),
    "spatial, 2 parts": (2, 32, lambda: SpatialStrategy(parts=2, start_method="fork")),
    "parameter_server, sync": (2, 16, lambda: ParameterServerStrategy(start_method="fork")),
}


class HookTimes:
    """Processor time of the main thread in the guard's hooks, in seconds.

    The hooks are replaced in the guard's class: a strategy would treat hooks of a subclass as a user's own.
    """

    def __init__(self) -> None:
        self.in_steps = self.in_check = 0.0
        for name in HOOKS:
            setattr(Guard, name, self._timed(name, getattr(Guard, name)))

    def _timed(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        @wraps(hook)
        def run(guard: Guard, trainer: Trainer, *args: Any) -> None:
            before, begin = trainer.global_step, time.thread_time()
            hook(guard, trainer, *args)
            seconds = time.thread_time() - begin
            if name == HOOKS[-1] and before % guard.every == 0:
                self.in_check = seconds
            elif before > FIRST:
                self.in_steps += seconds

        return run


TIMES = HookTimes()


class Clock(Callback):
    """Writes the times of this process: of all steps, of the guard in steps, and of the check.

    Args:
        folder: Folder for the times.
        steps: Number of steps, after which the guard checks.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin or end to count."""
        if trainer.global_step == FIRST:
            self.begin = time.process_time()
        elif trainer.global_step == self.steps:
            times = [time.process_time() - self.begin, TIMES.in_steps, TIMES.in_check]
            torch.save(torch.tensor(times), self.folder / f"{trainer.global_rank}.pt")


def run(steps: int, devices: int, batch: int, make: Callable[[], Any]) -> tuple[float, float, float]:
    """Train, and return the milliseconds of a step without the guard, of the guard in a step, and of a check."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 * steps, 3, 32, 32), torch.randint(10, (32 * steps,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=make(),
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Guard(every=steps), Clock(Path(folder), steps)],
        )
        module = ImageClassifier(SmallResNet(10), 10, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
        trainer.fit(module, DataLoader(data, batch, shuffle=True))
        total, in_steps, in_check = (
            torch.stack([torch.load(file) for file in Path(folder).glob("*.pt")]).mean(0).tolist()
        )
    count = steps - FIRST
    return 1000 * (total - in_steps - in_check) / count, 1000 * in_steps / count, 1000 * in_check


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=USUAL)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    rows = [("strategy", "a step without the guard, ms", "the guard in a step, ms", "a check, ms", "share")]
    for name, arguments in STRATEGIES.items():
        step, inside, check = run(steps, *arguments)
        share = (inside + check / USUAL) / step
        rows.append((name, f"{step:.1f}", f"{inside:.3f}", f"{check:.1f}", f"{share:.2%}"))
        print(*rows[-1], flush=True)
    assert __doc__ is not None
    text = "\n\n".join(part for part in __doc__.split("\n\n") if not part.startswith(" "))
    report(Path(__file__).with_suffix(".md"), "Cost of the guard", text, rows)


if __name__ == "__main__":
    main()
