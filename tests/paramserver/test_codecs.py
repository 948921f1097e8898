"""Choice of encodings by the duration of steps: it is right, fast and cheap, and it does not lose gradients."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.compression import PAYLOADS, Encoder, payload_compression, payload_names
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.codecs import LONGEST_WAIT, CodecChooser, ladder
from tests.paramserver.roles import Roles
from tests.paramserver.training import Replica, batches, make_network, specify

PLAIN = {"name": "SGD", "lr": 0.3}
SLOW, FAST = (1.6, 0.85, 0.45), (0.25, 0.25, 0.3)  # Seconds of a step with each level.
BUILT_IN = {"none", "fp16", "bf16", "topk", "onebit"}  # The compressions whose ladder these tests know.


@pytest.fixture
def built_in_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take compressions that someone has added out of the ladders of ``auto``."""
    assert {compression.name for compression in PAYLOADS.values()} >= BUILT_IN
    for compression in PAYLOADS.values():
        if compression.name not in BUILT_IN:
            monkeypatch.setattr(type(compression), "push_level", None)
            monkeypatch.setattr(type(compression), "pull_level", None)


class Run:
    """Steps of workers that wait for each other: the first worker chooses the level, and the others follow."""

    def __init__(self, workers: int = 1, noise: float = 0.0, seed: int = 0) -> None:
        self.choosers = [CodecChooser(3, workers > 1) for _ in range(workers)]
        self.levels: list[tuple[int, ...]] = []
        self._last: float | None = None
        self._random, self._noise = random.Random(seed), noise

    def steps(self, count: int, seconds: Sequence[float], interrupted: bool = False) -> "Run":
        """Make steps over a link on which each level takes the given seconds."""
        for step in range(len(self.levels), len(self.levels) + count):
            first = self.levels[-1][0] if self.levels else None
            chosen = self.choosers[0].next(step, None if interrupted else self._last)
            levels = (chosen, *(chooser.follow(step, first) for chooser in self.choosers[1:]))
            self._last = max(seconds[level] for level in levels) * max(0.5, self._random.gauss(1, self._noise))
            self.levels.append(levels)
        return self

    def share(self, count: int, seconds: Sequence[float]) -> float:
        """Return the speed of the last `count` steps as a fraction of the best level's speed, without the noise."""
        reached = sum(max(seconds[level] for level in levels) for levels in self.levels[-count:])
        return count * min(seconds) / reached


@pytest.mark.light
@pytest.mark.parametrize(("workers", "noise", "least"), [(1, 0.0, 0.9), (1, 0.2, 0.8), (3, 0.1, 0.85)])
def test_each_phase_of_a_link_nears_the_best_levels_speed(workers: int, noise: float, least: float) -> None:
    for seed in range(2):
        run = Run(workers, noise, seed)
        for seconds in (FAST, SLOW, (0.3, 0.2, 0.25), FAST, SLOW):
            run.steps(150, seconds)
            assert run.share(150, seconds) > least


@pytest.mark.light
def test_without_a_gain_no_lossy_level_is_used_and_trials_are_cheap() -> None:
    for seconds in ((0.2, 0.2, 0.3), (0.2, 0.21, 0.4), (0.2, 0.29, 0.4), (0.2, 2.0, 2.0)):
        run = Run().steps(1000, seconds)
        assert run.choosers[0].chosen == 0
        assert run.share(900, seconds) > 0.98
    assert Run().steps(100, (0.2, 0.195, 0.3)).choosers[0].chosen == 0, "a small gain is not worth it"
    assert Run().steps(100, (0.2, 0.185, 0.3)).choosers[0].chosen == 1
    run = Run(noise=0.05).steps(6 * LONGEST_WAIT, (0.3, 0.32, 0.4))
    tried = [step for step, (level,) in enumerate(run.levels) if level != 0]
    assert max(after - before for before, after in itertools.pairwise(tried)) > LONGEST_WAIT // 2
    assert sum(step >= 3 * LONGEST_WAIT for step in tried) <= 5 * 4
    slow = (10.0, 0.2, 0.2)  # A trial of the exact level is expensive.
    run = Run().steps(1500, slow)
    assert run.choosers[0].chosen == 1
    assert run.share(1300, slow) > 0.97


@pytest.mark.light
def test_two_slow_steps_count_as_a_change_of_the_link_and_one_does_not() -> None:
    for long, begins in ((1, False), (2, True)):  # Number of long steps, and whether trials begin.
        run = Run().steps(145, (0.2, 0.2, 0.3)).steps(long, (3.0, 3.0, 3.0)).steps(8, (0.2, 0.2, 0.3))
        assert any(level != 0 for (level,) in run.levels[145:]) == begins
    # In the first round all levels take the same time, because the link still loses packets.
    assert Run().steps(100, FAST).steps(12, (1.6, 1.6, 1.6)).steps(12, SLOW).choosers[0].chosen == 2
    assert Run().steps(6, (2.0, 2.0, 2.0)).steps(80, FAST).choosers[0].chosen == 0, (
        "a slow start does not change the choice"
    )
    run = Run().steps(40, FAST).steps(20, SLOW, interrupted=True)  # Interruptions do not count.
    assert len(set(run.levels[40:])) == 1
    steady = Run(noise=0.3).steps(1500, (0.2, 0.24, 0.3))
    assert steady.share(1000, (0.2, 0.24, 0.3)) > 0.975


@pytest.mark.light
def test_the_other_workers_use_the_first_workers_level_two_steps_later() -> None:
    """Check that workers try a level together: a single worker would not see the gain."""
    run = Run(workers=3).steps(100, FAST).steps(100, SLOW)
    for before, after in zip(run.levels, run.levels[2:], strict=False):
        assert after[1:] == (before[0], before[0])
    assert [chooser.chosen for chooser in run.choosers] == [2, 2, 2]
    run.choosers.pop(0)  # The next worker becomes the first worker and goes on from the same level.
    run.steps(20, SLOW)
    assert {level for levels in run.levels[-20:] for level in levels} == {2}
    assert run.steps(60, FAST).share(30, FAST) > 0.9


@pytest.mark.light
def test_a_trial_that_the_other_workers_do_not_make_does_not_count() -> None:
    """Check runs of which one in 25 would keep a level of half the speed if such a trial counted."""
    for seed in range(50):
        run = Run(workers=2, noise=0.15, seed=seed).steps(120, FAST).steps(120, SLOW)
        assert run.share(40, SLOW) > 0.8


@pytest.mark.light
@pytest.mark.usefixtures("built_in_ladder")
def test_the_ladder_varies_the_compressions_that_are_auto() -> None:
    def levels(pushes: str, pulls: str = "none", **options: Any) -> list[tuple[str, str]]:
        return list(ladder(specify(PLAIN, 2, compression=pushes, pull_compression=pulls, **options)))

    assert levels("none") == [("none", "none")]
    assert levels("auto", "bf16") == [("none", "bf16"), ("bf16", "bf16"), ("onebit", "bf16")]
    assert levels("fp16", "auto") == [("fp16", "none"), ("fp16", "fp16"), ("fp16", "onebit")]
    assert levels("auto", "auto") == [("none", "none"), ("bf16", "fp16"), ("onebit", "onebit")]
    assert levels("auto", "auto", mode="async")[2] == ("onebit", "fp16"), "in async mode workers do not share changes"
    half = [("w", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))]
    optimizer = torch.optim.SGD([half[0][1]], lr=0.1)
    narrow = Specification.of(half, optimizer, 1, compression="auto", pull_compression="auto")
    assert ladder(narrow) == [("none", "none"), ("onebit", "onebit")], "16 bits cannot be halved to 16"


@pytest.mark.light
@pytest.mark.parametrize("seed", range(3))
def test_sent_and_kept_parts_add_up_to_the_gradients_in_any_encoding(seed: int) -> None:
    """Use small whole numbers, which bf16 represents exactly."""
    from_here, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    encoder, pushed, received = Encoder("auto", 0.1), torch.zeros(64), torch.zeros(64)
    names = [from_here.choice(payload_names()) for _ in range(30)]
    for name in [*names, "none"]:
        encoder.compression = payload_compression(name)
        whole = name != "onebit"
        gradient = torch.randint(-3, 4, (64,), generator=generator).float() if whole else torch.zeros(64)
        before = gradient.clone()
        payload = memoryview(encoder.encode(gradient)).cast("B")
        assert torch.equal(gradient, before), "encoding does not change the gradient"
        pushed += gradient
        received += encoder.compression.decode(payload, 64, torch.float32)
        kept = encoder.left_out if encoder.left_out is not None else torch.zeros(64)
        torch.testing.assert_close(received + kept, pushed, rtol=0, atol=0.5)
    assert encoder.left_out is None


@pytest.mark.usefixtures("built_in_ladder")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_auto_trains_with_the_chosen_encodings(mode: str, tmp_path: Path) -> None:
    """Train for real, with invented durations of steps as over a slow link."""

    def train(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, PLAIN)
        replica.scheduler.step_size = 10**6
        worker: Worker = replica.worker
        assert worker.chooser is not None
        choose, follow, durations, firsts, codecs = worker.chooser.next, worker.chooser.follow, [], [], []

        def next(step: int, seconds: float | None) -> int:
            durations.append(seconds)
            codecs.append(choose(step, None if seconds is None else SLOW[codecs[-1]]))
            return codecs[-1]

        def note(step: int, first: int | None) -> int:
            firsts.append(first)
            codecs.append(follow(step, first))
            return codecs[-1]

        worker.chooser.next, worker.chooser.follow = next, note  # type: ignore[method-assign]
        worker.initialise()
        worker.join()
        losses = []
        for number, batch in enumerate(batches(1, 12) * 50):
            if number == 40:
                worker.wait_all()
                worker.interrupt()
            losses.append(replica.step(*batch))
        worker.wait_all()
        return losses[-1] / losses[0], worker.counters.bytes_sent, codecs, worker.codecs, durations, firsts

    options = specify(PLAIN, 2, mode=mode, compression="auto", pull_compression="auto", slice_bytes=1 << 16)
    counts = [p.numel() for p in make_network().parameters()]
    size = 8 * sum(counts), 2 * sum(counts), sum(8 + (count + 7) // 8 for count in counts)
    with Roles(tmp_path, options) as run:
        results = run.train(train)
    levels_of_first = results[0][2]
    for number, (loss, sent, levels, codecs, durations, firsts) in enumerate(results):
        assert codecs == ("onebit", "onebit" if mode == "sync" else "fp16")
        assert levels[-3:] == [2, 2, 2]
        assert set(levels) == {0, 1, 2}
        assert loss < 0.6
        least = sum(72 * 6 + size[level] for level in levels)
        assert least <= sent <= least + 4 * (72 * 6 + size[0]), "messages without a timely answer are sent again"
        if mode == "sync" and number == 1:
            assert firsts[1:] == levels_of_first[:-1], "the level of the first worker in the step before"
        else:
            assert [number for number, seconds in enumerate(durations) if seconds is None] == [0, 40]
            assert all(seconds > 0 for seconds in durations if seconds is not None)
