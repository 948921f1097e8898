"""Messages between two servers are numbered without gaps, as long as both live."""

import pytest

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import Kind, Parcel
from cnnstrategies.paramserver.server.outbox import Outbox

pytestmark = pytest.mark.light


def test_numbers_go_on_over_a_new_connection_and_begin_anew_with_a_new_life() -> None:
    outbox = Outbox(0, session=1)
    numbers = []
    for view, info in enumerate(
        [ServerInfo(1, "ipc://a", since=1), ServerInfo(1, "ipc://b", since=1), ServerInfo(1, "ipc://b", since=3)]
    ):
        outbox.follow(View(view + 1, (info,), ()))
        outbox.to_server(1, Kind.PING)
        numbers += [effect.header.sequence for effect in outbox.take() if isinstance(effect, Parcel)]
    assert numbers == [1, 2, 1]


def test_what_was_for_a_server_that_is_gone_is_not_sent() -> None:
    """Its driver has no connection to it any more, or one to another process."""
    stays, goes, renewed = (ServerInfo(one, f"ipc://{one}", since=1) for one in (1, 2, 3))
    outbox = Outbox(0, session=1)
    outbox.follow(View(1, (stays, goes, renewed), ()))
    for server in (1, 2, 3):
        outbox.to_server(server, Kind.PING)
    outbox.follow(View(2, (stays, ServerInfo(3, "ipc://3", since=2)), ()))
    assert [effect.to for effect in outbox.take() if isinstance(effect, Parcel)] == [1]
