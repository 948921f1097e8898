"""The coordinator's work for a collective: all contributions are packed once, so the work grows linearly."""

import sys
from types import FrameType
from typing import Any

import pytest

from cnnstrategies.paramserver.coordinator.contributions import pack, unpack
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.settings import WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer, Send
from cnnstrategies.paramserver.drivers.control import encode

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    "contributions",
    [
        {},
        {0: [b"first", b""], 3: [], 7: [b"x" * 1000]},
        {0: [b"a", b"b"], 1: [b"a", b"b"], 2: [b"b", b"a"], 3: [b"b", b"a"], 5: [b"b", b"a"]},
        {worker: [b"same", bytes([worker])] for worker in range(256)},
    ],
)
def test_contributions_are_the_same_after_packing_and_unpacking(contributions: dict[int, list[bytes]]) -> None:
    unpacked = unpack(pack(contributions))
    assert {worker: [bytes(frame) for frame in frames] for worker, frames in unpacked.items()} == contributions


@pytest.mark.parametrize("index", ["[[],[[0,1,0]]]", "[[1],[[0]]]", "[[1],[[0,99999,0]]]", "[[2],[]]", "[[-1],[]]"])
@pytest.mark.parametrize("body", [b"", b"x"])
def test_an_index_that_does_not_fit_the_body_is_refused(index: str, body: bytes) -> None:
    with pytest.raises(ControlError, match="result of a collective"):
        unpack([index.encode(), body])


@pytest.mark.parametrize("index", ["", "[", "3", "[]", "{}", "[[],[],[]]", "[[true],[]]", '[["0"],[]]', "[[],[3]]"])
def test_an_index_of_another_form_is_refused(index: str) -> None:
    with pytest.raises(ControlError, match="result of a collective"):
        unpack([index.encode(), b""])
    with pytest.raises(ControlError, match="has 1 frames"):
        unpack([b"[[],[]]"])


class Instructions:
    """Context that counts the instructions of Python code. The count does not depend on the machine's speed."""

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace

    def __enter__(self) -> "Instructions":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def collective(workers: int, differ: bool) -> tuple[float, float]:
    """Run a collective from the requests to the encoded replies.

    Args:
        workers: Number of workers.
        differ: Whether the workers contribute different values.

    Returns:
        Instructions of the coordinator and bytes of the replies, each divided by the number of workers.
    """
    coordinator = Coordinator(CoordinatorSettings("here", workers, 0, timeout=10.0))
    peers = [Peer(WORKER, number, 0, number + 1) for number in range(workers)]
    hello = {"host": "here", "endpoint": "", "public_key": "", "session": 0}
    coordinator.start(0.0)
    for peer in peers:
        coordinator.on_message(0.0, peer, Message("hello", {**hello, "process": peer.process}, (), 1))
    fields = {"session": 0, "sequence": 0, "operation": "gather", "seal": False, "boundary": False, "floor": 2}
    replies: dict[int, int] = {}
    with Instructions() as instructions:
        for peer in peers:
            value = str(peer.id).encode() if differ else b"the same value"
            for effect in coordinator.on_message(1.0, peer, Message("collect", fields, [b"structure", value], 2)):
                if isinstance(effect, Send) and effect.message.request == 2:
                    replies[effect.to.id] = len(encode(peer, effect.message))
    assert len(replies) == workers
    return instructions.count / workers, sum(replies.values()) / workers


def test_the_coordinators_work_for_a_collective_grows_linearly_with_the_workers() -> None:
    """Compare the work for each worker. With work of N squared, 512 workers would need 16 times as much as 32."""
    for differ in (True, False):
        few, many = collective(32, differ), collective(512, differ)
        assert many[0] < 1.2 * few[0], f"{many[0]:.0f} instructions for each of 512 workers, {few[0]:.0f} for 32"
    assert many[1] < 1.2 * few[1], f"{many[1]:.0f} bytes for each of 512 workers, {few[1]:.0f} for each of 32"
