"""The coordinator and its members in virtual time, with faults: the code that runs is the code that is simulated."""

import ast
from collections import Counter

import pytest
from conftest import ROOT

from cnnstrategies.paramserver.core.node import Call, Effects, Message, Peer, Return
from cnnstrategies.paramserver.core.requests import DONE, PROBE, TIMER, Answering, Asking
from cnnstrategies.paramserver.simulation.control import BUSY, TIMEOUT, simulate
from cnnstrategies.paramserver.simulation.faults import Faults
from cnnstrategies.paramserver.simulation.run import explain
from cnnstrategies.paramserver.simulation.shrink import shrink
from cnnstrategies.paramserver.simulation.world import Ask, World

pytestmark = pytest.mark.light
SEEDS = 100
LIGHT_ROLES, ROLES = ("core", "coordinator"), ("core", "coordinator", "server", "worker")
IMPURE = {"zmq", "threading", "time", "os", "random", "socket", "queue", "multiprocessing", "asyncio"}


def imported(module: str, found: set[str]) -> set[str]:
    """All that a module of this package imports, and what that imports."""
    if module in found:
        return found
    found.add(module)
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not module.startswith("cnnstrategies.") or not path.exists():
        return found
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported(alias.name, found)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported(node.module, found)
    return found


def test_roles_have_no_sockets_threads_clocks_files_or_random_numbers():
    folder = ROOT / "cnnstrategies/paramserver"
    modules = [
        (role, ".".join(path.relative_to(ROOT).with_suffix("").parts))
        for role in ROLES
        for path in (folder / role).glob("*.py")
    ]
    assert len(modules) > 30
    for role, module in modules:
        impure = IMPURE | {"torch", "numpy"} if role in LIGHT_ROLES else IMPURE
        assert not {name.partition(".")[0] for name in imported(module, set())} & impure, module


class Counting:
    """Counts each request once."""

    def __init__(self):
        self.handled = Counter()
        self.answering = Answering()

    def start(self, now: float) -> Effects:
        return []

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        if message.kind == PROBE:
            return self.answering.probe(sender, message, lambda peer, number: ())
        new, effects = self.answering.take(sender, message)
        if not new:
            return effects
        self.handled[message.fields["value"]] += 1
        return self.answering.answer(sender, Message(DONE, message.fields, request=message.request))


class Caller:
    """Asks one coordinator."""

    def __init__(self):
        self.asking = Asking(Peer("coordinator", 0), {})

    def start(self, now: float) -> Effects:
        return []

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        request, effects = self.asking.on_reply(now, message)
        return effects if request is None else [*effects, Return(request.call, message)]

    def on_timer(self, now: float, name: str) -> Effects:
        assert name == TIMER
        return self.asking.on_timer(now)

    def on_call(self, now: float, call: Call) -> Effects:
        return self.asking.ask(now, call.kind, call.fields, call.frames, call.number)


@pytest.mark.parametrize("seed", range(20))
def test_each_request_is_answered_and_handled_once(seed):
    faults = Faults(seed, [("coordinator", 0), ("worker", 0)], 1.0, 1.0)
    faults.timed = [fault for fault in faults.timed if fault.kind != "kill"]
    world, counting, got = World(seed, faults), Counting(), []

    def program():
        for value in range(40):
            answer = yield Ask("count", {"value": value})
            got.append(answer.fields["value"])

    world.spawn(Peer("coordinator", 0), counting, (value for value in ()))
    world.spawn(Peer("worker", 0), Caller(), program())
    while len(got) < 40 and world.now < 60 and world.step():
        pass
    assert got == list(range(40))
    assert counting.handled == Counter(range(40))
    assert counting.answering.entries < 10


def test_nothing_is_violated(pytestconfig: pytest.Config) -> None:
    """`make simulate FIRST=... SEEDS=1` explains a seed."""
    counts: Counter[str] = Counter()
    first = SEEDS * pytestconfig.getoption("seed_offset")
    for seed in range(first, first + SEEDS):
        outcome = simulate(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        counts += outcome.counts
    faults = "kill worker", "kill server", "kill coordinator", "pause worker", "cut worker", "deaf worker", "lost"
    for kind in (*faults, "join", "join after a boundary"):
        assert counts[kind], kind


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((1050, 65275, 66398), id="a restart before training begins beside workers that nobody waited for"),
        pytest.param((100408,), id="a server is a new one for its first hello comes late after a restart"),
        pytest.param((100859, 101375), id="a worker has forgotten the result that it is to hand over after a restart"),
        pytest.param((1970,), id="a coordinator waits for a server that was lost before it was started again"),
        pytest.param((6559,), id="a collective comes late to a coordinator that follows another"),
        pytest.param((7281,), id="a worker begins again between the start of training and a restart"),
        pytest.param((11337,), id="a server dies and the run is over before the reports after a restart are there"),
        pytest.param((57518, 61596), id="somebody comes just when a coordinator has given up waiting for reports"),
        pytest.param((74304,), id="a server that has never come is missed by a coordinator that follows another"),
        pytest.param((48027,), id="what workers know that nobody has heard leave may be agreed on once more"),
        pytest.param((11455,), id="one that joins before training begins is the first to report after a restart"),
        pytest.param((111021,), id="a joiner that has left tells the next coordinator less than it had worked on"),
        pytest.param((415971,), id="a worker is let in while another one that is cut off waits in the next collective"),
        pytest.param((306594,), id="a coordinator is killed with the only one that it has told that training begins"),
        pytest.param((318212,), id="a question that a worker has repeated is answered when it has gone on to the next"),
        pytest.param(
            (270147, 311001), id="a coordinator that misses a member after a restart is killed before it is heard"
        ),
        pytest.param((361490,), id="a coordinator that follows another hears first who knows of no training yet"),
        pytest.param(
            (357771,), id="a worker that leaves knows alone what all have agreed on when a coordinator is killed"
        ),
        pytest.param((371715,), id="a contribution comes a second time when its answer is no longer kept"),
        pytest.param((344713,), id="a coordinator is cut off for as long as all others have to appear"),
        pytest.param((392524, 394598), id="training begins anew when only those are left that were started again"),
        pytest.param((10241,), id="a process that is killed while it is stopped stays dead"),
        pytest.param((662686,), id="a member is cut off for a time-out when the run is over for another reason"),
        pytest.param((690721,), id="a worker counts as dead of whom all messages are lost by chance for a time-out"),
        pytest.param((646,), id="a worker dies with a chunk of an epoch when the next has begun for the others"),
        pytest.param((178,), id="the next epoch begins before one that was let in late has taken what is left for it"),
        pytest.param((3508,), id="a worker dies that has taken chunks and was not let in yet"),
        pytest.param((6167,), id="a coordinator is killed while it lets somebody in after a boundary"),
        pytest.param((710930,), id="a worker that hears nothing by chance, and then of a coordinator that is stopped"),
    ],
)
def test_the_seeds_that_found_a_fault_hold_now(seeds):
    for seed in seeds:
        outcome = simulate(seed)
        assert outcome.violation is None, explain(seed, outcome, simulate)


def test_a_seed_is_all_that_is_needed_to_repeat_a_run():
    assert simulate(3, traced=True) == simulate(3, traced=True)
    assert simulate(3).events == simulate(3, traced=True).events


def test_a_fault_that_is_taken_away_moves_no_other():
    places = [("worker", 0), ("server", 0)]
    seed = next(seed for seed in range(100) if len(Faults(seed, places, TIMEOUT, BUSY).timed) == 4)
    full = Faults(seed, places, TIMEOUT, BUSY)
    part = Faults(seed, places, TIMEOUT, BUSY, removed=frozenset((full.timed[1],)))
    assert part.timed == [full.timed[0], *full.timed[2:]]
    lossy = next(seed for seed in range(100) if not Faults(seed, places, TIMEOUT, BUSY).tcp)
    met = Faults(lossy, places, TIMEOUT, BUSY)
    whole = [met.arrivals(0.0, 1, ordinal) for ordinal in range(500)]
    some = Faults(lossy, places, TIMEOUT, BUSY, removed=frozenset(met.met[:1]))
    again = [some.arrivals(0.0, 1, ordinal) for ordinal in range(500)]
    assert [one for one in range(500) if whole[one] != again[one]] == [ordinal for _, ordinal in met.met[:1]]


def test_what_is_left_after_shrinking_is_needed():
    assert shrink(range(100), lambda part: {3, 70} <= set(part)) == [3, 70]
    assert shrink(range(10), lambda part: True) == []


def test_a_failing_seed_is_explained_by_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Asking.on_reply
    # A request that never came is not sent again.
    monkeypatch.setattr(Asking, "on_reply", lambda self, now, message: (right(self, now, message)[0], []))
    seed, outcome = next((seed, found) for seed in range(SEEDS) if (found := simulate(seed)).violation)
    faults, _, trace = explain(seed, outcome, simulate).partition("\n   0.0000")
    assert faults.startswith(f"seed {seed}: 17: ")
    assert 1 <= faults.count("\n  ") < len(outcome.faults)
    assert "coordinator 0 starts" in trace
