import contextlib
import time
from collections.abc import Iterator

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
    server_socket,
)
from cnnstrategies.paramserver.messages import HEADER_BYTES, Bounds, Header, InvalidMessageError, Kind, unpack

SESSION = 1 << 40


@contextlib.contextmanager
def pair() -> Iterator[tuple[Socket, Socket]]:
    """Two ends of a connection; no fixture, for it could not be used in the process that the test is forked into."""
    with zmq.Context() as context:
        near, far = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
        far.bind("inproc://far")
        near.connect("inproc://far")
        yield near, far
        near.close()
        far.close()


def header(sequence: int, length: int) -> Header:
    return Header(Kind.PUSH, 0, SESSION, sequence, length=length)


def came(far: Socket) -> list[list[Received]]:
    """What has come, together or one after the other."""
    inbox = Inbox(far, SESSION, routed=True, encrypted=False)
    bundles = []
    while far.poll(100):
        bundles.append(inbox.receive())
    return bundles


def numbers(received: list[Received]) -> list[int]:
    return [unpack(one.header, len(one.payload), SESSION, Bounds(1 << 20, 1)).sequence for one in received]


def test_small_messages_wait_for_one_that_does_not() -> None:
    with pair() as (near, far):
        bundle = Bundle(near)
        for number in (1, 2):
            bundle.send(header(number, 3), b"abc", wait=True)
        assert came(far) == []
        bundle.send(header(3, 0))
        bundle.send(header(4, 0))
        first, second = came(far)
        assert (numbers(first), numbers(second)) == ([1, 2, 3], [4])
        assert [bytes(one.payload) for one in first] == [b"abc", b"abc", b""]
        assert len({one.route for one in first + second}) == 1


def test_a_large_message_and_a_flush_take_along_what_waits() -> None:
    with pair() as (near, far):
        bundle = Bundle(near)
        bundle.send(header(1, 0), b"", wait=True)
        bundle.send(header(2, SMALL_BYTES + 1), bytes(SMALL_BYTES + 1), wait=True)
        bundle.send(header(3, 0), b"", wait=True)
        bundle.flush()
        bundle.flush()
        first, second, third = came(far)
        assert [numbers(together) for together in (first, second, third)] == [[1], [2], [3]]
        assert bytes(second[0].payload) == bytes(SMALL_BYTES + 1)


def test_what_waits_is_bounded_in_number_and_size() -> None:
    with pair() as (near, far):
        bundle = Bundle(near)
        for number in range(MOST_TOGETHER + 1):
            bundle.send(header(number, 0), b"", wait=True)
        assert [len(together) for together in came(far)] == [MOST_TOGETHER]
        bundle.flush()
        came(far)
        for _ in range(BUNDLE_BYTES // SMALL_BYTES):
            bundle.send(header(1, SMALL_BYTES), bytes(SMALL_BYTES), wait=True)
        assert [len(together) for together in came(far)] == [BUNDLE_BYTES // SMALL_BYTES]


def refused(received: Received) -> bool:
    try:
        numbers([received])
    except InvalidMessageError:
        return True
    return False


def test_what_is_no_whole_message_is_refused() -> None:
    whole, large = header(1, 0).pack(), header(1, SMALL_BYTES + 1).pack() + bytes(SMALL_BYTES)
    with pair() as (near, far):
        for frames in ([whole, whole], [b""], [whole[1:]], [header(1, 3).pack() + b"ab"], [large]):
            near.send_multipart(frames)
            ((received,),) = came(far)
            assert refused(received), frames


def test_a_header_without_payload_takes_no_other_for_it() -> None:
    """The payload may be lost with a connection, and the next message be as long as it was."""
    large = SMALL_BYTES + 1
    with pair() as (near, far):
        near.send(header(1, large).pack())
        near.send(header(2, large - HEADER_BYTES).pack() + bytes(large - HEADER_BYTES))
        near.send(header(3, large).pack())
        near.send(bytes(large))
        near.send(bytes(large))
        none, second, still, third, alone = came(far)
    assert none == still == []
    assert (numbers(second), numbers(third)) == ([2], [3])
    assert refused(alone[0])


def test_a_frame_beyond_the_declared_size_does_not_come() -> None:
    context: Context = zmq.Context()
    listener = Listener("tcp://127.0.0.1:*", insecure=True)
    router = server_socket(context, listener, None, largest=1000)
    for size in (1001, 1000):
        near = context.socket(zmq.DEALER)
        near.connect(listener.endpoint)
        near.send(bytes(size))
        time.sleep(0.1)
    came = [len(router.recv_multipart()[1]) for wait in (60_000, 200) if router.poll(wait)]
    context.destroy(0)
    assert came == [1000]
