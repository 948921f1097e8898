"""The check of the order of messages finds orders that do not end, and messages that break NCCL's rules."""

import pytest

from tests.runner.device_order import END, P2P, READ, Message, check_order

BOTH = frozenset({(0, 1), (1, 0)})
SUM = Message("sum", "g", (0, 1))
ROWS, WAIT, LOOK = Message(P2P, "g", (0, 1), BOTH), Message(END), Message(READ)
HOSTS = Message("sum", "h", (0, 1), is_on_device=False)
CHAIN = [
    Message(P2P, "g", (0, 1, 2), frozenset(pairs))
    for pairs in ({(0, 1), (1, 0)}, {(0, 1), (1, 0), (1, 2), (2, 1)}, {(1, 2), (2, 1)})
]
SUM_OF_ALL = Message("sum", "g", (0, 1, 2))


@pytest.mark.light
@pytest.mark.parametrize(
    "ranks",
    [
        [[SUM, ROWS, WAIT, SUM, LOOK]] * 2,
        [[SUM_OF_ALL, rows, WAIT, SUM_OF_ALL] for rows in CHAIN],
        [[SUM, HOSTS, LOOK, SUM], [SUM, LOOK, HOSTS, SUM]],
        [[SUM, ROWS, WAIT], [SUM, ROWS, WAIT], []],
    ],
)
def test_orders_that_end_pass(ranks: list[list[Message]]) -> None:
    check_order(ranks)


@pytest.mark.light
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([[SUM, ROWS, WAIT, SUM], [SUM, SUM, ROWS, WAIT]], "wait for each other without end"),
        ([[SUM, SUM, LOOK, HOSTS], [SUM, HOSTS, SUM, LOOK]], "wait for each other without end"),
        ([[SUM, ROWS, WAIT, SUM], [SUM, ROWS, WAIT]], "wait for each other without end"),
        ([[SUM, Message(P2P, "g", (0, 1), frozenset({(0, 1)})), WAIT], [SUM]], "wait for each other without end"),
        ([[SUM, ROWS, SUM, WAIT]] * 2, "rank 0 posts .* before the end of"),
        ([[SUM, ROWS]] * 2, "rank 0 does not wait for"),
        ([[ROWS, WAIT]] * 2, "is the first message of its group"),
    ],
)
def test_orders_without_an_end_and_early_messages_are_found(ranks: list[list[Message]], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_order(ranks)
