"""Tests of `tune`'s contest between settings, with simulated trials of known speed."""

import os
import random
import time
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.tune import contest
from cnnstrategies.planning.tune.contest import Contest
from cnnstrategies.planning.tune.settings import Setting, factorial, nested
from cnnstrategies.planning.tune.trial import TrialError

pytestmark = pytest.mark.light
SPEEDS = {"fast": 1.5, "faster": 2.0, "slow": 0.6, "wrong": 3.0, "new": 1.2, "dies anew": 1.2}
LUCKY = {"lucky": (1, 1.15), "lucky twice": (2, 1.15), "luckier": (1, 1.202)}  # Number of fast processes, their speed.


class Pretended:
    """A simulated trial of known speed."""

    open: ClassVar[set["Pretended"]] = set()
    most = 0
    started: ClassVar[list[str | None]] = []

    def __init__(self, folder, name, words, seconds, command):
        (folder / f"{name}.log").touch()
        values = yaml.safe_load(Path(words[-1]).read_text()) if "--config" in words else {}
        self.kind = values.get("kind")
        often, speed = LUCKY.get(self.kind, (0, 1.0))
        self.speed = speed if Pretended.started.count(self.kind) < often else SPEEDS.get(self.kind, 1.0)
        self.draw = random.Random(str(self.kind))  # Strings' hashes differ between processes; their seeds do not.
        Pretended.started.append(self.kind)
        self.asked = 0
        Pretended.open.add(self)
        Pretended.most = max(Pretended.most, len(Pretended.open))

    def wait_until_ready(self):
        if self.kind == "broken" or (self.kind == "dies anew" and Pretended.started.count(self.kind) > 1):
            raise TrialError("the compiler failed")

    def steps(self, count):
        self.asked += 1
        if self.kind == "dying" and self.asked > 5:
            raise TrialError("out of memory")
        losses = [2.0, 1.9, 1.81 if self.kind in ("wrong", "new") else 1.8]
        seconds = count / self.speed * 0.1 * self.draw.uniform(0.98, 1.02)
        return {"seconds": seconds, "losses": losses}

    def close(self):
        Pretended.open.discard(self)


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "Trial", Pretended)
    Pretended.open, Pretended.most = set(), 0

    def run(*kinds: str, effect: Effect = Effect.LEARNING, together: int = 9):
        Pretended.started = []
        made = Contest(["fit"], tmp_path, time.monotonic() + 60, together)
        winner = made.run([Setting(kind, {"kind": kind}, effect) for kind in kinds])
        return winner.name if winner else None, made.rows

    yield run
    assert not Pretended.open, "a trial was left running"


def test_the_fastest_wins_and_every_candidate_gets_a_row(pretended):
    winner, rows = pretended("fast", "faster", "slow", "even", "broken", together=2)
    assert Pretended.most == 3, "two candidates may run together, and the default runs beside them"
    assert winner == "faster"
    assert {name: row.verdict.outcome for name, row in rows.items() if row.verdict} == {
        "fast": "behind",
        "faster": "faster",
        "slow": "behind",
        "even": "no difference",
    }
    assert rows["broken"].trouble == "the compiler failed"


def test_a_candidate_that_dies_in_its_rounds_does_not_stop_the_contest(pretended):
    for kind, trouble in (("dying", "out of memory"), ("dies anew", "the compiler failed")):
        winner, rows = pretended(kind)
        assert winner is None
        assert rows[kind].trouble == trouble
    winner, rows = pretended("dying", "faster")
    assert winner == "faster"
    assert rows["dying"].trouble == "out of memory"


def test_a_setting_that_changes_the_loss_is_refused_unless_it_may_change_learning(pretended):
    _, rows = pretended("wrong", effect=Effect.ROUNDING)
    assert "changes the loss: 1.81 instead of 1.8" in rows["wrong"].trouble
    assert pretended("wrong")[0] == "wrong"


# By case: settings that are tried, the winner, the winner's number of rounds, and the settings of the started processes
# (None: the default). By chance a process can be faster than an equal process for as long as it runs, but it cannot be
# twice as fast.
CASES = {
    "a single candidate": (["faster"], "faster", 11, [None, "faster"]),
    "the fastest of two candidates": (["faster", "slow"], "faster", 7, [None, "faster", "slow"]),
    "a small gain must be confirmed by pairs of new processes in alternating order": (
        ["new"], "new", 21, [None, "new", "new", None, None, "new", "new", None],
    ),
    "lucky once": (["lucky"], None, None, [None, "lucky", "lucky", None]),
    "lucky twice": (["lucky twice"], None, None, [None, "lucky twice", "lucky twice", None, None, "lucky twice"]),
    "the second candidate is tried after the first was not confirmed": (
        ["new", "luckier"], "new", 21, [None, "new", "luckier", "luckier", None, "new", None, None, "new", "new", None],
    ),
}  # fmt: skip


def test_a_gain_wins_only_if_new_processes_confirm_it(pretended):
    for case, (tried, winner, rounds, started) in CASES.items():
        chosen, rows = pretended(*tried)
        assert chosen == winner, case
        assert Pretended.started == started, case
        for name, row in rows.items():
            if name == winner:
                assert row.verdict.rounds == rounds, case
                assert row.verdict.speed == pytest.approx(SPEEDS[name], rel=0.02), case
            else:
                assert row.verdict.outcome in ("no difference", "undecided", "behind"), case


def test_a_gain_without_time_to_confirm_is_undecided(pretended, monkeypatch):
    confirm = Contest.fresh_verdicts

    def hurried(self, setting):
        monkeypatch.setattr(contest.time, "monotonic", lambda: 1e9)
        return confirm(self, setting)

    monkeypatch.setattr(Contest, "fresh_verdicts", hurried)
    winner, rows = pretended("new")
    assert winner is None
    assert rows["new"].verdict.outcome == "undecided"


def test_a_default_that_does_not_run_ends_the_contest(pretended, monkeypatch):
    def fails(self):
        raise TrialError("out of memory")

    monkeypatch.setattr(Pretended, "wait_until_ready", fails)
    with pytest.raises(TrialError, match="out of memory"):
        pretended("fast")


def test_settings_are_combined_in_all_ways():
    effects = {"last": Effect.ROUNDING, "compiled": Effect.ROUNDING, "bf16": Effect.LEARNING}
    combined = list(factorial([[Setting(name, {name: 1}, effect)] for name, effect in effects.items()]))
    assert len(combined) == 7
    assert combined[-1] == Setting("last, compiled, bf16", dict.fromkeys(effects, 1), Effect.LEARNING)


def test_an_overlay_is_nested_yaml_and_replaced_in_one_step(tmp_path, monkeypatch):
    """Programs that write the same overlay do not use each other's temporary file, for example trials of a sweep."""
    replace, names = os.replace, []

    def note(source, target):
        names.append(Path(source).name)
        return replace(source, target)

    monkeypatch.setattr("os.replace", note)
    values = {"trainer.precision": "bf16-mixed", "ComputeSettings.channels_last": True}
    for process in (1, 2):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        write_commented(tmp_path / "tuned.yaml", nested(values), ["twice as fast"])
    assert len(set(names)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.yaml"]
    text = (tmp_path / "tuned.yaml").read_text()
    assert text.startswith("# twice as fast\n")
    callback = {"class_path": "cnnstrategies.callbacks.ComputeSettings", "init_args": {"channels_last": True}}
    assert yaml.safe_load(text) == {"trainer": {"callbacks+": callback, "precision": "bf16-mixed"}}
