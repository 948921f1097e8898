"""How much bf16 and channels_last can speed a step up, and what limits it: the parts of a step, and three other ways.

Beside what `tune` combines (channels_last, bf16-mixed, inductor) three other ways are tried: weights and images in bf16
themselves, so that nothing is cast; twice the batch; and no optimizer at all. In plain torch, so that nothing else is
timed. The parts are operators' own times by torch.profiler, in milliseconds.
"""

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from bench import HERE, threads
from networks import images, resnet_like, vgg_like
from ranks import report
from torch import nn
from torch.profiler import ProfilerActivity, profile

BATCH = 64
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {"ResNet-20": (resnet_like, 10), "VGG-11": (vgg_like, 100)}
WAYS: dict[str, set[str]] = {
    "Lightning's defaults": set(),
    "channels_last": {"channels_last"},
    "bf16-mixed": {"bf16"},
    "channels_last, bf16-mixed": {"channels_last", "bf16"},
    "channels_last, bf16-mixed, inductor": {"channels_last", "bf16", "inductor"},
    "channels_last, weights in bf16": {"channels_last", "true"},
    "channels_last, bf16-mixed, twice the batch": {"channels_last", "bf16", "twice"},
    "channels_last, bf16-mixed, no optimizer": {"channels_last", "bf16", "none"},
}
PROFILED = ("Lightning's defaults", "channels_last", "channels_last, bf16-mixed")
PARTS = {
    "convolutions and products": r"conv|mm|linear",
    "normalisation": r"batch_norm",
    "casts and copies": r"copy|::to$|contiguous|clone",
    "optimizer": r"_foreach|_fused|Optimizer",
}
STEPS = 20


class Step:
    """Training steps of a network in one way.

    Args:
        network: Makes it.
        classes: That it tells apart.
        way: What is done.
    """

    def __init__(self, network: Callable[[], nn.Module], classes: int, way: set[str]) -> None:
        torch.manual_seed(0)
        self.samples = BATCH * (2 if "twice" in way else 1)
        self.images, self.targets = images(32, self.samples, classes)
        self.network = network()
        if "channels_last" in way:
            self.network = self.network.to(memory_format=torch.channels_last)
            self.images = self.images.to(memory_format=torch.channels_last)
        if "true" in way:
            self.network, self.images = self.network.to(torch.bfloat16), self.images.to(torch.bfloat16)
        self.called = torch.compile(self.network) if "inductor" in way else self.network
        self.mixed = "bf16" in way
        parameters = list(self.network.parameters())
        self.optimizer = None if "none" in way else torch.optim.SGD(parameters, 0.01, momentum=0.9)

    def __call__(self) -> None:
        """One step."""
        self.network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            loss = nn.functional.cross_entropy(self.called(self.images), self.targets)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def seconds(self, steps: int) -> float:
        """Return the seconds per sample."""
        start = time.perf_counter()
        for _ in range(steps):
            self()
        return (time.perf_counter() - start) / steps / self.samples

    def parts(self) -> Counter[str]:
        """Milliseconds of each part of a step."""
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            for _ in range(STEPS):
                self()
        times: Counter[str] = Counter()
        for event in watched.key_averages():
            part = next((name for name, pattern in PARTS.items() if re.search(pattern, event.key)), "all else")
            times[part] += event.self_cpu_time_total / 1000 / STEPS
        return times


def main() -> None:
    """Time all ways in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    names = [*PARTS, "all else"]
    rows: list[tuple[str, ...]] = [("network", "way", "times Lightning's defaults", "of each round", *names)]
    for network, (make, classes) in NETWORKS.items():
        steps = {name: Step(make, classes, way) for name, way in WAYS.items()}
        for step in steps.values():
            step.seconds(3)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(rounds):
            for name in sorted(steps, reverse=bool(index % 2)):
                times[name].append(steps[name].seconds(5))
        for name in steps:
            gains = [base / time for base, time in zip(times["Lightning's defaults"], times[name], strict=True)]
            parts = steps[name].parts() if name in PROFILED else Counter()
            milliseconds = [f"{parts[part]:.1f}" if parts else "" for part in names]
            spread = f"{min(gains):.2f} to {max(gains):.2f}"
            rows.append((network, name, f"{statistics.median(gains):.2f}", spread, *milliseconds))
    flags = set(Path("/proc/cpuinfo").read_text().split())
    units = ", ".join(sorted(flags & {"amx_bf16", "avx512_bf16"})) or "none"
    text = f"{__doc__}\nBatches of {BATCH} images of 32 x 32, SGD with momentum. The processor's bf16 units: {units}."
    report(HERE / "bf16_limits.md", "What limits bf16 on processors", text, rows, threads())


if __name__ == "__main__":
    main()
