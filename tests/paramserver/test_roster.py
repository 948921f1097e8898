"""Who is in a run, and what the servers among them know."""

import json
import time

import pytest

from cnnstrategies.paramserver.control import Message
from cnnstrategies.paramserver.roster import SERVER, WORKER, Member, Roster
from cnnstrategies.paramserver.view import View

pytestmark = pytest.mark.light


@pytest.mark.parametrize(("survivable", "goes_on"), [(1, True), (0, False)])
def test_a_lost_server_need_not_have_seen_a_view_if_others_have_its_slices(survivable, goes_on):
    """Without them the run ends or waits for the one that takes its place: no worker may go on into a step."""
    roster = Roster(1, 2, survivable, send=lambda message: None)
    members = [Member(SERVER, number, 0, 1, "here", b"", time.monotonic(), acknowledged=5) for number in (0, 1)]
    for member in members:
        roster.add(member)
    assert roster.servers_have_seen(5)
    assert not roster.servers_have_seen(6)
    roster.remove(members[1])
    assert not roster.servers_have_seen(5)
    roster.lost_servers.add(1)
    assert roster.servers_have_seen(5) == goes_on


def test_a_view_is_encoded_once_and_its_number_has_one_content():
    sent: list[Message] = []
    roster = Roster(3, 1, 0, send=sent.append)
    for number in range(3):
        roster.add(Member(WORKER, number, 0, 1, "here", bytes([number + 1]), time.monotonic()))
    roster.sealed = True
    roster.publish()
    assert [message.sender for message in sent] == [b"\1", b"\2", b"\3"]
    assert len({id(message.encoded) for message in sent}) == 1
    roster.remove(roster.find(WORKER, 1))
    roster.send_view(roster.find(WORKER, 0))  # Who asks again before the next view is told what the others were.
    assert sent[-1].encoded is sent[0].encoded
    view = View.from_dict(json.loads(sent[0].encoded)["view"])
    assert (view.number, [worker.id for worker in view.workers]) == (1, [0, 1, 2])
