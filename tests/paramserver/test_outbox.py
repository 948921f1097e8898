"""Messages between two servers are numbered without gaps, as long as both live."""

import pytest

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.effects import Parcel
from cnnstrategies.paramserver.messages import Kind
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
