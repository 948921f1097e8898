"""Frames with one or several messages: messages do not wait for ever, and incomplete messages are refused."""

import contextlib
import socket as sockets
import struct
import time
from collections.abc import Iterator

import pytest
import zmq

from cnnstrategies.paramserver.drivers.sockets import (
    BUNDLE_BYTES,
    MOST_TOGETHER,
    SMALL_BYTES,
    Bundle,
    Context,
    Inbox,
    Listener,
    Received,
    Socket,
    largest_frame,
    server_socket,
)
from cnnstrategies.paramserver.messages import HEADER_BYTES, Bounds, Header, InvalidMessageError, Kind, unpack
from tests.runner.forked import run_forked

SESSION = 1 << 40
LARGE = SMALL_BYTES + 1


@contextlib.contextmanager
def pair() -> Iterator[tuple[Socket, Socket]]:
    """Give both ends of a connection. This is not a fixture: the test is forked, and sockets do not survive a fork."""
    with zmq.Context() as context:
        near, far = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
        far.bind("inproc://far")
        near.connect("inproc://far")
        yield near, far
        near.close()
        far.close()


def header(sequence: int, length: int = 0) -> Header:
    return Header(Kind.PUSH, 0, SESSION, sequence, length=length)


def received_frames(far: Socket) -> list[list[Received]]:
    """Return the received messages, one list for each frame."""
    inbox = Inbox(far, SESSION, routed=True, encrypted=False)
    bundles = []
    while far.poll(100):
        bundles.append(inbox.receive())
    return bundles


def numbers(received: list[Received]) -> list[int]:
    return [unpack(message.header, len(message.payload), SESSION, Bounds(1 << 20, 1)).sequence for message in received]


def test_small_messages_wait_for_the_next_and_for_a_flush() -> None:
    with pair() as (near, far):
        bundle = Bundle(near)
        for number in (1, 2):
            bundle.send(header(number, 3), b"abc", wait=True)
        assert received_frames(far) == []
        bundle.send(header(3))
        bundle.send(header(4), b"", wait=True)
        bundle.send(header(5, LARGE), bytes(LARGE), wait=True)
        bundle.send(header(6), b"", wait=True)
        bundle.flush()
        bundle.flush()
        bundles = received_frames(far)
        assert [numbers(together) for together in bundles] == [[1, 2, 3], [4], [5], [6]]
        payloads = [bytes(message.payload) for together in bundles for message in together]
        assert payloads == [b"abc", b"abc", b"", b"", bytes(LARGE), b""]
        assert len({message.route for together in bundles for message in together}) == 1


def test_the_number_and_size_of_waiting_messages_are_bounded() -> None:
    for count, size in ((MOST_TOGETHER, 0), (BUNDLE_BYTES // SMALL_BYTES, SMALL_BYTES)):
        with pair() as (near, far):
            bundle = Bundle(near)
            for number in range(count + 1):
                bundle.send(header(number, size), bytes(size), wait=True)
            assert [len(together) for together in received_frames(far)] == [count]


def test_an_incomplete_message_is_refused() -> None:
    whole, short = header(1).pack(), header(1, 3).pack() + b"ab"
    with pair() as (near, far):
        for frames in ([whole, whole], [b""], [whole[1:]], [short], [header(1, LARGE).pack() + b"a"]):
            near.send_multipart(frames)
            (received,) = received_frames(far)
            with pytest.raises(InvalidMessageError):
                numbers(received)


def test_a_header_without_its_payload_does_not_take_another_message_as_payload() -> None:
    """Lose a payload with its connection: the next message may be exactly as long as the payload."""
    with pair() as (near, far):
        near.send(header(1, LARGE).pack())
        near.send(header(2, LARGE - HEADER_BYTES).pack() + bytes(LARGE - HEADER_BYTES))
        near.send(header(3, LARGE).pack())
        near.send(bytes(LARGE))
        near.send(bytes(LARGE))
        none, second, still, third, alone = received_frames(far)
    assert none == still == []
    assert (numbers(second), numbers(third)) == ([2], [3])
    with pytest.raises(InvalidMessageError):
        numbers(alone)


def test_a_frame_beyond_the_declared_size_is_dropped() -> None:
    context: Context = zmq.Context()
    listener = Listener("tcp://127.0.0.1:*", insecure=True)
    router = server_socket(context, listener, None, largest=1000)
    for size in (1001, 1000):
        near = context.socket(zmq.DEALER)
        near.connect(listener.endpoint)
        near.send(bytes(size))
        time.sleep(0.1)
    sizes = [len(router.recv_multipart()[1]) for wait in (60_000, 200) if router.poll(wait)]
    context.destroy(0)
    assert sizes == [1000]


# A connection without encryption in ZeroMQ's protocol 3.1 (RFC 37): the greeting, the handshake of a DEALER, a message
# of one byte, and a heartbeat.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + bytes(4)
MESSAGE, PING = b"\0\x01x", b"\x04\x07\x04PING\0\0"


def connection(endpoint: str) -> sockets.socket:
    """Return a connection to a server whose handshake is complete."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    made = sockets.create_connection((host, int(port)))
    made.sendall(GREETING + READY)
    received = b""
    while len(received) < len(GREETING) or b"READY" not in received:
        received += made.recv(1000)
    return made


def test_a_broken_connection_with_unread_messages_and_heartbeats_does_not_abort_a_server() -> None:
    """Otherwise libzmq aborts the server, because it had no place for all messages before the connection broke."""
    count = 200

    def serve() -> None:
        context: Context = zmq.Context()
        listener = Listener("tcp://127.0.0.1:*", insecure=True)
        router = server_socket(context, listener, None, largest_frame(1000))
        broken = connection(listener.endpoint)
        broken.sendall(count * (MESSAGE + PING))
        broken.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))  # Closing breaks it.
        broken.close()
        connection(listener.endpoint)  # After this handshake libzmq's thread has seen the end of the connection.
        for _ in range(count):
            router.recv_multipart()
        context.destroy(0)

    assert run_forked(serve, timeout=60) == (0, "")
