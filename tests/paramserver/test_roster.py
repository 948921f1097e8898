"""Who is in a run, and what the servers among them know."""

import time

import pytest

from cnnstrategies.paramserver.roster import SERVER, Member, Roster

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
