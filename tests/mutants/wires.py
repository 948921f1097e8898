"""Mutants of transport: corrupted bytes, silent connections and lost parts of messages."""

import contextlib

import zmq

from cnnstrategies.paramserver.core.view import ServersUnreachableError
from cnnstrategies.paramserver.drivers.sockets import Bundle, notice_silence, send
from cnnstrategies.paramserver.messages import SMALL_BYTES, InvalidMessageError, begins
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_failures, test_transport

A_BYTE_CHANGES = test_failures.test_a_changed_byte_costs_only_a_connection


@replaces(send, killed_by=A_BYTE_CHANGES, noticed_by=(ServersUnreachableError,), back=True, changed="contents")
def a_connection_that_libzmq_gave_up_is_not_opened_again(original, socket, frame):
    with contextlib.suppress(zmq.Again):
        socket.send(frame, zmq.NOBLOCK, copy=False)


removes(
    notice_silence,
    "a silent connection is waited for without end",
    killed_by=A_BYTE_CHANGES,
    noticed_by=(ServersUnreachableError,),
    back=False,
    changed="length",
)


@replaces(begins, killed_by=test_transport.test_a_header_without_its_payload_does_not_take_another_message_as_payload)
def a_message_is_read_as_the_payload_of_a_lost_message(original, data, session):
    return original(data, session) and len(data) <= SMALL_BYTES


@replaces(
    Bundle.flush,
    killed_by=test_transport.test_small_messages_wait_for_the_next_and_for_a_flush,
    noticed_by=(InvalidMessageError,),
)
def half_a_multipart_message_may_be_sent(original, self):
    *first, last = self._waiting or [b""]
    for part in first:
        self._to.send(part, zmq.SNDMORE)
    self._waiting = [last]
    original(self)
