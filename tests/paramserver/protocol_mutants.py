"""Guarantees of the protocol that can be taken away, each with the text that gives it."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

PACKAGE = "cnnstrategies.paramserver."


class ProtocolMutant(NamedTuple):
    """One change of a class.

    Attributes:
        name: What is taken away.
        place: Module and class.
        old: The text that is replaced; it is there once.
        new: What replaces it.
        seed: One that notices.
    """

    name: str
    place: str
    old: str
    new: str
    seed: int = 0


MUTANTS = [
    ProtocolMutant(
        "a request that never came is not sent again",
        "core.requests:Asking",
        'again = [self.open[number].message for number in message.integers("ids") if number in self.open]',
        "again = []",
        seed=4,
    ),
    ProtocolMutant(
        "only one probe is sent",
        "core.requests:Asking",
        "return [Send(self.peer, probe), Timer(TIMER, now + self._interval)]",
        "return [Send(self.peer, probe)]",
        seed=1,
    ),
    ProtocolMutant(
        "a lost answer is not sent again",
        "core.requests:Answering",
        "[Send(sender, side.kept[number]) for number in numbers if number in side.kept]",
        "[]",
        seed=4,
    ),
    ProtocolMutant(
        "who missed the end is not told again",
        "coordinator.coordinator:Coordinator",
        "            self._send(member.peer, self._ended)\n            return\n        if message.integer",
        "            return\n        if message.integer",
        seed=27,
    ),
    ProtocolMutant(
        "who missed a view is not told again",
        "coordinator.coordinator:Coordinator",
        'if message.integer("here") < self._roster.number:',
        "if False:",
        seed=7,
    ),
    ProtocolMutant(
        "nobody is missed",
        "coordinator.admission:Admission",
        "if now - member.seen > patience:\n                self._miss",
        "if False:\n                self._miss",
        seed=2,
    ),
    ProtocolMutant(
        "a pause of the coordinator is taken for the silence of others",
        "coordinator.coordinator:Coordinator",
        "if passed > PAUSE * self._settings.least:",
        "if False:",
        seed=37,
    ),
    ProtocolMutant(
        "a promised replacement is waited for without end",
        "coordinator.watchdog:Watchdog",
        "if now > until:",
        "if False:",
        seed=105,
    ),
    ProtocolMutant(
        "what a dead worker brought counts",
        "coordinator.meetings:Rounds",
        "        self._pending.pop(worker, None)\n",
        "",
        seed=13,
    ),
    ProtocolMutant(
        "a collective asked for again is another",
        "coordinator.meetings:Rounds",
        "told is not None and told.peer == peer and told.asked == sequence",
        "False",
        seed=18,
    ),
    ProtocolMutant(
        "workers begin before all servers know them",
        "coordinator.meetings:Rounds",
        "if result.view and self._without(result):",
        "if False:",
        seed=1,
    ),
    ProtocolMutant(
        "a view number has several contents",
        "coordinator.roster:Roster",
        "self.number + 1,",
        "max(self.number, 1),",
        seed=1,
    ),
    ProtocolMutant(
        "chunks of a dead worker are lost",
        "coordinator.dispatch:Dispatcher",
        "self._epochs[max(self._epochs)].waiting.extendleft(reversed(share.held))",
        "pass",
        seed=2,
    ),
    ProtocolMutant(
        "a chunk asked for again is another",
        "coordinator.dispatch:Dispatcher",
        "share.last is not None and ordinal <= share.asked",
        "False",
        seed=2,
    ),
    ProtocolMutant(
        "a coordinator that follows another begins with the same numbers",
        "coordinator.roster:Roster",
        "View(term * TERM, (), (), begun=begun)",
        "View(0, (), (), begun=begun)",
        seed=7,
    ),
    ProtocolMutant(
        "the first half of a restart is skipped",
        "coordinator.recovery:Recovery",
        "now > (self._until if self._number >= 0 else self._latest) or not (self.missing() or self._successors())",
        "bool(self.hellos)",
        seed=20,
    ),
    ProtocolMutant(
        "chunks that were given out before a restart are given out again",
        "coordinator.restart:Restart",
        'self._parts.dispatcher.follow(recovery.epochs(but=let_go), recovery.state.get("done", ()))',
        "pass",
        seed=8,
    ),
    ProtocolMutant(
        "the last result before a restart is decided anew",
        "coordinator.restart:Restart",
        "*range(max(0, sequence - 1), sequence)",
        "*()",
        seed=292,
    ),
    ProtocolMutant(
        "a coordinator that follows another before training waits for no worker",
        "coordinator.recovery:Recovery",
        'if self.state["sealed"] < 0:',
        "if False:",
        seed=1050,
    ),
    ProtocolMutant(
        "results of the set-up go down with the coordinator",
        "coordinator.restart:Restart",
        "{*range(set_up), ",
        "{*(), ",
        seed=175,
    ),
    ProtocolMutant(
        "a server that goes on is taken for a new one",
        "coordinator.restart:Restart",
        "since=since,",
        "since=roster.number + 1,",
        seed=7,
    ),
    ProtocolMutant(
        "a hello that was meant for a coordinator before this one counts",
        "coordinator.coordinator:Coordinator",
        'if message.kind == "hello" and message.fields.get("term", 0) != self._settings.term:',
        "if False:",
        seed=100408,
    ),
    ProtocolMutant(
        "members go on to new results before they have handed over the last one",
        "coordinator.meetings:Rounds",
        "        if self._lacks:\n            return  #",
        "        if False:\n            return  #",
        seed=101375,
    ),
    ProtocolMutant(
        "a collective counts that its sender knows the result of",
        "coordinator.meetings:Rounds",
        "if sequence < member.told:",
        "if False:",
        seed=6559,
    ),
    ProtocolMutant(
        "a worker is told after a restart what the one before it took part in",
        "coordinator.meetings:Rounds",
        "behind = self._behind & self._roster.group",
        "behind = self._behind",
        seed=7281,
    ),
    ProtocolMutant(
        "a coordinator that has given up a restart gives views",
        "coordinator.admission:Admission",
        "if not over:",
        "if True:",
        seed=11337,
    ),
    ProtocolMutant(
        "values go down with the coordinator",
        "coordinator.restart:Restart",
        "self._parts.values.give(item.removeprefix(VALUE), message.frames)",
        "pass",
        seed=51,
    ),
    ProtocolMutant(
        "a coordinator forgets what the one before it has waited for",
        "coordinator.restart:Restart",
        "if not left and roster.at(peer.role, peer.id) is None:",
        "if False:",
        seed=1970,
    ),
    ProtocolMutant(
        "a coordinator that follows another takes it that all servers have been there when training began",
        "coordinator.roster:Roster",
        "for place in (*workers, *lost,",
        "for place in (*workers, *itertools.product((SERVER,), range(self._servers if self.sealed else 0)), *lost,",
        seed=74304,
    ),
    ProtocolMutant(
        "who joins begins before all servers know it",
        "coordinator.meetings:Rounds",
        "        self._hold(result, [(one, True) for one in joiners.values()])",
        "        [self._tell(one, result, True) for one in joiners.values()]",
        seed=15,
    ),
    ProtocolMutant(
        "who joins and leaves does not say how far it has come",
        "coordinator.coordinator:Coordinator",
        'if "epoch" in message.fields:',
        "if False:",
        seed=21,
    ),
    ProtocolMutant(
        "a place is given twice with the same life",
        "coordinator.roster:Roster",
        "self.number // TERM * LIVES",
        "0",
        seed=65,
    ),
    ProtocolMutant(
        "what those have done who joined and left goes down with the coordinator",
        "coordinator.restart:Restart",
        'recovery.state.get("done", ())',
        "()",
        seed=41,
    ),
    ProtocolMutant(
        "a joiner that has left tells a coordinator that follows what it had, as if that was all",
        "coordinator.restart:Restart",
        "if self._was_let_go(peer)]",
        "if False]",
        seed=137965,
    ),
    ProtocolMutant(
        "who was missed after a restart is not missed after the next",
        "coordinator.admission:Admission",
        "self._roster.gone[member.peer] = False",
        "pass",
        seed=270147,
    ),
    ProtocolMutant(
        "nobody can begin to train when those are gone who were told that training begins",
        "coordinator.meetings:Rounds",
        "sequence >= self._roster.sealed_at",
        "sequence > self._roster.sealed_at",
        seed=306594,
    ),
    ProtocolMutant(
        "an old question that is answered late takes the place of the last",
        "coordinator.meetings:Rounds",
        "last.asked <= one.asked",
        "True",
        seed=318212,
    ),
    ProtocolMutant(
        "a coordinator that follows another does not wait for those that have begun anew before training",
        "coordinator.recovery:Recovery",
        "not (self.missing() or self._successors())",
        "not self.missing()",
        seed=361490,
    ),
    ProtocolMutant(
        "a worker's contribution that comes a second time is taken for one to an older collective",
        "coordinator.meetings:Rounds",
        "        member.told = sequence\n",
        "",
        seed=371715,
    ),
    ProtocolMutant(
        "a member that may be behind a link that is cut is missed after the time-out",
        "coordinator.admission:Admission",
        "if now - member.seen > patience:",
        "if now - member.seen > self._settings.timeout:",
        seed=1677,
    ),
    ProtocolMutant(
        "a process that may be behind a link that is cut gives the coordinator up after the time-out",
        "coordinator.participant:Participant",
        "patience = self._address.patience if",
        "patience = self._address.timeout if",
        seed=96,
    ),
    ProtocolMutant(
        "a member that has not heard why the run is over is told that it was silent",
        "coordinator.admission:Admission",
        " and peer not in self._left_behind",
        "",
        seed=662686,
    ),
    ProtocolMutant(
        "nothing is left for who comes back in mid-epoch",
        "coordinator.coordinator:Coordinator",
        "self._roster.of_the_run.union(own)",
        "self._roster.of_the_run",
        seed=832,
    ),
    ProtocolMutant(
        "what was left for who comes back goes to the next epoch without it",
        "coordinator.dispatch:Dispatcher",
        "if needs_one and not epoch.waiting:",
        "if False:",
        seed=646,
    ),
    ProtocolMutant(
        "what was loaded before a worker knew its epoch is lost",
        "coordinator.dispatch:Dispatcher",
        "for number in [one for one in self._epochs if one < before]:",
        "for number in ():",
        seed=79,
    ),
    ProtocolMutant(
        "what a worker leaves behind that dies late waits in an epoch that is over",
        "coordinator.dispatch:Dispatcher",
        "self._epochs[max(self._epochs)].waiting.extendleft",
        "self._epochs[min(self._epochs)].waiting.extendleft",
        seed=89,
    ),
    ProtocolMutant(
        "what one has taken that dies before it is let in is lost",
        "coordinator.coordinator:Coordinator",
        "        self._dispatcher.lose(worker, joined=self._roster.is_elastic(WORKER, worker))\n"
        "        if worker in self._roster.group:\n",
        "        if worker in self._roster.group:\n"
        "            self._dispatcher.lose(worker, joined=self._roster.is_elastic(WORKER, worker))\n",
        seed=98,
    ),
    ProtocolMutant(
        "all wait for one that was being let in as the coordinator was killed",
        "coordinator.meetings:Rounds",
        "            if late:",
        "            if False:",
        seed=6167,
    ),
    ProtocolMutant(
        "copies take over that are not complete",
        "coordinator.admission:Admission",
        "return is_complete and all(",
        "return is_complete or all(",
        seed=197,
    ),
]


def apply(mutant: ProtocolMutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a class the methods of its changed text, for a test."""
    name, _, of = mutant.place.partition(":")
    module = importlib.import_module(PACKAGE + name)
    text = inspect.getsource(module)
    assert text.count(mutant.old) == 1, f"{mutant.name}: the text to replace is there {text.count(mutant.old)} times"
    changed = ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, changed)
    exec(compile(text.replace(mutant.old, mutant.new), f"{name}, changed", "exec"), changed.__dict__)
    original, replacement = getattr(module, of), getattr(changed, of)
    for attribute, value in vars(replacement).items():
        if inspect.isfunction(value) or isinstance(value, property | staticmethod):
            monkeypatch.setattr(original, attribute, value)
