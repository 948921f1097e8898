"""What comes of bytes that change on their way between processes."""

import contextlib
from collections.abc import Callable
from typing import Any

import test_failures
import test_transport
import zmq
from mutants.faulty import replaces

from cnnstrategies.paramserver.drivers.sockets import Bundle, Socket, notice_silence, send
from cnnstrategies.paramserver.messages import SMALL_BYTES, InvalidMessageError, begins

A_BYTE_CHANGES = test_failures.test_a_byte_that_changes_on_its_way_costs_a_connection


@replaces(send, killed_by=A_BYTE_CHANGES, back=True, what="contents")
def a_connection_that_libzmq_has_given_up_is_not_made_anew(
    right: Callable[[Socket, Any], None], socket: Socket, frame: Any
) -> None:
    with contextlib.suppress(zmq.Again):
        socket.send(frame, zmq.NOBLOCK, copy=False)


@replaces(notice_silence, killed_by=A_BYTE_CHANGES, back=False, what="length")
def a_connection_on_which_nothing_comes_is_waited_for(
    right: Callable[[Socket, float, int], None], socket: Socket, seconds: float, largest: int = 0
) -> None:
    pass


@replaces(begins, killed_by=test_transport.test_a_header_without_payload_takes_no_other_for_it)
def a_message_is_taken_for_the_payload_that_was_lost(
    right: Callable[[bytes | memoryview, int], bool], data: bytes | memoryview, session: int
) -> bool:
    return right(data, session) and len(data) <= SMALL_BYTES


@replaces(
    Bundle.flush,
    killed_by=test_transport.test_small_messages_wait_for_one_that_does_not,
    noticed_by=(InvalidMessageError,),
)
def half_a_message_may_leave(right: Callable[[Bundle], None], self: Bundle) -> None:
    *first, last = self._waiting or [b""]
    for part in first:
        self._to.send(part, zmq.SNDMORE)
    self._waiting = [last]
    right(self)
