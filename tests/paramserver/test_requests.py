"""Requests and their answers; a large answer is not repeated faster than a slow link can carry it."""

import pytest

from cnnstrategies.paramserver.core.node import Message, Peer, Send
from cnnstrategies.paramserver.core.requests import DONE, SMALL_ANSWER, Answering, Asking

pytestmark = pytest.mark.light
HERE, THERE = Peer("worker", 0), Peer("coordinator", 0)


def probes_before_an_answer(size: int, probes: int) -> list[int]:
    """Return the numbers of the probes after which an answer of `size` bytes is sent, if every answer is lost."""
    asking, answering = Asking(THERE, {}), Answering()
    sent = []

    def deliver(number: int, effects: list) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            if effect.message.kind == "probe":
                for reply in answering.probe(HERE, effect.message):
                    deliver(number, asking.on_reply(0.0, reply.message)[1])
                continue
            assert answering.accept(HERE, effect.message)
            answering.answer(HERE, Message(DONE, {}, [bytes(size)], effect.message.request))
            sent.append(number)

    deliver(0, asking.ask(0.0, "values", {}))
    for number in range(1, probes + 1):
        deliver(number, asking.on_timer(0.0))
    return sent


@pytest.mark.parametrize(
    ("size", "sent"), [(SMALL_ANSWER, [*range(65)]), (SMALL_ANSWER + 1, [0, 5, 14, 31, 64])], ids=["small", "large"]
)
def test_a_large_answer_is_repeated_at_growing_intervals(size: int, sent: list[int]) -> None:
    """Probe every second: an answer that takes a minute to arrive is repeated four times instead of sixty times."""
    assert probes_before_an_answer(size, 64) == sent


def test_records_of_large_answers_end_with_the_answers() -> None:
    asking, answering = Asking(THERE, {}), Answering()
    for _ in range(3):
        (asked, *_) = asking.ask(0.0, "values", {})
        answering.accept(HERE, asked.message)
        (answered,) = answering.answer(HERE, Message(DONE, {}, [bytes(SMALL_ANSWER + 1)], asked.message.request))
        asking.on_reply(0.0, answered.message)
    assert answering.entries == 2, "one entry for the last answer and one for its peer"


@pytest.mark.parametrize("answered", [False, True])
def test_the_oldest_open_request_is_handled_again_if_its_answer_is_lost(answered: bool) -> None:
    asking, answering = Asking(THERE, {}), Answering()
    first, second = (asking.ask(0.0, "values", {})[0].message for _ in range(2))
    assert all(answering.accept(HERE, message) for message in (first, second))
    if answered:
        answering.answer(HERE, Message(DONE, {}, [], second.request))  # This answer is lost.
    (done,) = answering.answer(HERE, Message(DONE, {}, [], first.request))
    asking.on_reply(0.0, done.message)
    (third, *_) = asking.ask(0.0, "values", {})
    assert third.message.fields["floor"] == second.request
    answering.accept(HERE, third.message)
    assert not answering.accept(HERE, first), "the first request has been answered"
    (probe, *_) = asking.on_timer(0.0)
    lost = [effect.message.fields["ids"] for effect in answering.probe(HERE, probe.message)]
    assert lost == [[second.request]] * answered
    assert answering.accept(HERE, second) == answered
