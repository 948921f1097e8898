"""Who is in a run, and what the servers among them know."""

import pytest

from cnnstrategies.paramserver.coordinator.roster import SERVER, WORKER, Member, Roster
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import View

pytestmark = pytest.mark.light


@pytest.mark.parametrize(("survivable", "goes_on"), [(1, True), (0, False)])
def test_a_lost_server_need_not_have_seen_a_view_if_others_have_its_slices(survivable, goes_on):
    """Without them the run ends or waits for the one that takes its place: no worker may go on into a step."""
    roster = Roster(1, 2, survivable, send=lambda peer, message: None)
    members = [Member(Peer(SERVER, number), 1, "here", 0.0, acknowledged=5) for number in (0, 1)]
    for member in members:
        roster.add(member)
    assert not roster.not_seen(5)
    assert roster.not_seen(6)
    roster.remove(members[1])
    assert roster.not_seen(5) == ["server 1"]
    roster.lost_servers.add(1)
    assert (not roster.not_seen(5)) == goes_on


def test_a_view_is_one_message_for_all_and_its_number_has_one_content():
    sent: list[Message] = []
    roster = Roster(3, 1, 0, send=lambda peer, message: sent.append(message))
    for number in range(3):
        roster.add(Member(Peer(WORKER, number), 1, "here", 0.0))
    roster.sealed_at = 0
    roster.publish()
    assert len({id(message) for message in sent}) == 1
    roster.remove(roster.at(WORKER, 1))
    assert roster.view_message is sent[0]  # Who asks again before the next view is told what the others were.
    view = View.from_dict(sent[0].fields["view"])
    assert (view.number, [worker.id for worker in view.workers], view.begun) == (1, [0, 1, 2], 1)
    roster.publish()
    assert View.from_dict(sent[-1].fields["view"]).begun == 1, "that of the first"
