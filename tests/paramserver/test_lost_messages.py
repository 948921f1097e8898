"""Any message may be lost, and nobody waits for ever: what is not answered is asked for again."""

import re
from collections import Counter

import pytest
from control_world import LOST, trained
from simulation import control
from simulation.faults import Moment, Network

from cnnstrategies.paramserver.core.node import Peer, Send

pytestmark = pytest.mark.light
KINDS = ("hello", "beat", "pong", "view", "collect", "put", "get", "epoch", "take", "leave", "done", "probe", "unknown")


class WithoutTheFirst(Network):
    """Loses the first two messages of each kind."""

    def __init__(self) -> None:
        super().__init__(0, control.TIMEOUT, tcp=False)
        self.sent: Counter[str] = Counter()

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        self.sent[send.message.kind] += 1
        return LOST if self.sent[send.message.kind] <= 2 else None


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_first_of_each_kind_is_lost(restarts: int) -> None:
    """One that is sent only once, or in one case only, is not left to chance."""
    network = WithoutTheFirst()
    outcome = control.run(control.Plan(restarts=restarts), network, pace=0)
    assert outcome.violation is None
    assert outcome.end == "worker 0 comes to the end; worker 1 comes to the end"
    assert all(network.sent[kind] > 2 for kind in KINDS), network.sent


def test_an_answer_that_is_lost_is_sent_again() -> None:
    run, peers = trained(2)
    run.call(peers[0], "epoch", epoch=0, samples=4, chunk=1)
    with run.loses(lambda send: send.message.kind == "done"):
        chunk = run.call(peers[0], "take", epoch=0, processed=0)
        gathered = [run.collect(peer) for peer in peers]
    run.passes(3.0)
    assert [answer.fields["ids"] for answer in gathered] == [[0, 1]] * 2
    assert chunk.fields["start"] == 0
    assert run.call(peers[0], "take", epoch=0, processed=0).fields["start"] == 1


def test_a_coordinator_that_hears_heartbeats_and_no_requests_is_named() -> None:
    run, (worker,) = trained(1)
    with run.loses(lambda send: send.message.kind in ("collect", "probe")):
        waits = run.collect(worker, "end")
        run.passes(29.0)
        assert run.ended(worker) is None
        run.passes(3.0)
    assert isinstance(waits.value, str)
    assert re.fullmatch(
        "worker 0: the coordinator at here has not answered `end` for 3[01] s, although it hears this process's "
        "heartbeats",
        waits.value,
    )


def test_the_silence_of_rank_0_ends_a_run_although_nobody_says_what_becomes_of_it() -> None:
    """Its supervision may be gone with it: then the promise that it would be replaced is nobody's."""
    run, (zero, one) = trained(2)
    run.strike("pause", zero, 1000.0)
    run.passes(25.0)  # The time-out, and as long for a supervision.
    ended = run.ended(one)
    assert ended is not None
    assert "worker 0 (process 4711 on here) was silent for 10 s, and nobody took" in ended.reason
