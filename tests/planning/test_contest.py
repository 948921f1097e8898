"""Candidates' runs side by side, with runs that only pretend."""

import random
import time
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune import contest
from cnnstrategies.planning.tune.contest import Contest
from cnnstrategies.planning.tune.settings import Setting, factorial, nested, write_commented
from cnnstrategies.planning.tune.trial import TrialError

pytestmark = pytest.mark.light
SPEEDS = {None: 1.0, "fast": 1.5, "faster": 2.0, "slow": 0.6, "even": 1.0, "wrong": 3.0, "new": 1.2, "lucky": 1.15}
SPEEDS |= {"lucky twice": SPEEDS["lucky"], "luckier": 1.202}


class Pretended:
    """A trial whose speed is known."""

    open: ClassVar[set["Pretended"]] = set()
    most = 0
    started: ClassVar[list[str | None]] = []

    def __init__(self, folder, name, words, seconds, loads):
        (folder / f"{name}.log").touch()
        values = yaml.safe_load(Path(words[-1]).read_text()) if "--config" in words else {}
        self.kind = values.get("kind")
        starts = [one for one in Pretended.started if one == self.kind]
        Pretended.started.append(self.kind)
        luck = {"lucky": 1, "luckier": 1, "lucky twice": 2}.get(str(self.kind), len(starts) + 1)
        self.speed = SPEEDS.get(self.kind, 1.0) if len(starts) < luck else 1.0
        self.draw = random.Random(str(self.kind))  # Not its hash, which differs from process to process.
        Pretended.open.add(self)
        Pretended.most = max(Pretended.most, len(Pretended.open))

    def wait_until_ready(self):
        if self.kind == "broken":
            raise TrialError("the compiler failed")

    def steps(self, count):
        losses = [2.0, 1.9, 1.8]
        if self.kind in ("wrong", "new"):
            losses = [2.0, 1.9, 1.81]
        seconds = count / self.speed * 0.1 * self.draw.uniform(0.98, 1.02)
        return {"seconds": seconds, "losses": losses, "loading": 0.0}

    def close(self):
        Pretended.open.discard(self)


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "Trial", Pretended)
    Pretended.open, Pretended.most, Pretended.started = set(), 0, []

    def run(*settings: Setting, together: int = 9):
        made = Contest(["fit"], tmp_path, time.monotonic() + 60, together)
        return made.run(settings), made.rows

    yield run
    assert not Pretended.open, "a trial was left running"


def setting(kind: str, effect: Effect = Effect.ROUNDING) -> Setting:
    return Setting(kind, {"kind": kind}, effect)


def test_the_fastest_wins_and_every_candidate_gets_a_row(pretended):
    winner, rows = pretended(*(setting(kind) for kind in ("fast", "faster", "slow", "even", "broken")), together=2)
    assert Pretended.most == 3, "no more beside the default than are allowed"
    assert winner is not None
    assert winner.name == "faster"
    assert {name: row.verdict.outcome for name, row in rows.items() if row.verdict} == {
        "fast": "behind",
        "faster": "faster",
        "slow": "behind",
        "even": "no difference",
    }
    assert rows["broken"].trouble == "the compiler failed"


def test_what_changes_the_loss_is_refused_unless_allowed(pretended):
    winner, rows = pretended(setting("wrong"), setting("new", Effect.LEARNING))
    assert "changes the loss: 1.81 for 1.8" in rows["wrong"].trouble
    assert winner is not None
    assert winner.name == "new"


def test_a_small_gain_must_show_again_in_processes_of_its_own(pretended):
    """A process may be quicker than its equal as long as it lives; twice as fast is no luck."""
    winner, rows = pretended(setting("lucky"))
    assert winner is None
    assert rows["lucky"].verdict.outcome in ("no difference", "undecided")
    assert Pretended.started == [None, "lucky", "lucky", None], "the other way round"
    assert pretended(setting("faster"))[0] is not None
    assert Pretended.started[4:] == [None, "faster"]


def test_the_best_meets_the_default_again_and_a_lone_one_not(pretended, monkeypatch):
    """The fastest of many is in part the luckiest; of one nothing was chosen."""
    fresh: list[str] = []
    orders = Contest.fresh_verdict
    monkeypatch.setattr(
        Contest, "fresh_verdict", lambda self, name, *rest: fresh.append(name) or orders(self, name, *rest)
    )
    assert pretended(setting("faster"))[0] is not None
    assert not fresh
    assert pretended(setting("faster"), setting("slow"))[0] is not None
    assert fresh == ["faster"]


def test_a_small_gain_in_each_pair_of_processes_wins(pretended):
    """And one that is lucky twice does not."""
    winner, rows = pretended(setting("new", Effect.LEARNING))
    assert winner is not None
    assert rows["new"].verdict.rounds == 21
    assert rows["new"].verdict.speed == pytest.approx(1.2, rel=0.02)
    assert Pretended.started == [None, "new", "new", None, None, "new", "new", None]
    Pretended.started.clear()
    winner, rows = pretended(setting("lucky twice"))
    assert winner is None
    assert rows["lucky twice"].verdict.low < 1.02
    assert Pretended.started == [None, "lucky twice", "lucky twice", None, None, "lucky twice"]


def test_when_the_best_was_lucky_the_next_is_tried(pretended):
    winner, rows = pretended(setting("new", Effect.LEARNING), setting("luckier"))
    assert winner is not None
    assert winner.name == "new"
    assert rows["luckier"].verdict.outcome in ("no difference", "undecided", "behind")


def test_a_gain_without_time_to_confirm_is_undecided(pretended, monkeypatch):
    confirm = Contest.fresh_verdicts

    def hurried(self, setting):
        monkeypatch.setattr(contest.time, "monotonic", lambda: 1e9)
        return confirm(self, setting)

    monkeypatch.setattr(Contest, "fresh_verdicts", hurried)
    winner, rows = pretended(setting("new", Effect.LEARNING))
    assert winner is None
    assert rows["new"].verdict.outcome == "undecided"


def test_a_default_that_does_not_run_ends_it(pretended, monkeypatch):
    def fails(self):
        raise TrialError("out of memory")

    monkeypatch.setattr(Pretended, "wait_until_ready", fails)
    with pytest.raises(TrialError, match="out of memory"):
        pretended(setting("fast"))


def test_settings_are_combined_in_all_ways():
    last, compiled, bf16 = (
        Setting("last", {"a": 1}, Effect.ROUNDING),
        Setting("compiled", {"b": 2}, Effect.ROUNDING),
        Setting("bf16", {"c": 3}, Effect.LEARNING),
    )
    combined = list(factorial([[last], [compiled], [bf16]]))
    assert len(combined) == 7
    assert combined[-1] == Setting("last, compiled, bf16", {"a": 1, "b": 2, "c": 3}, Effect.LEARNING)


def test_an_overlay_is_nested_yaml_and_written_whole(tmp_path, monkeypatch):
    """Programs that write the same one, as those of a sweep do that end at once, do not take each other's file."""
    replace, names = Path.replace, []

    def note(self, target):
        names.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
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
