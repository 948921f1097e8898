"""Messages are checked at the edge, and what fails behind it is a mistake that is heard of."""

from collections.abc import Callable
from typing import Any

import test_coordinator_fuzz
import test_insider_fuzz
import test_own_mistakes
from mutants.faulty import replaces

from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.drivers.control import Loop
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.messages import Effects, Header
from cnnstrategies.paramserver.server.server import Server

OURS = (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


@replaces(
    Server.on_message,
    killed_by=test_own_mistakes.test_a_server_takes_no_mistake_of_its_own_for_a_bad_message,
    mistake=KeyError,
)
def a_servers_own_mistake_counts_as_a_bad_message(
    right: Callable[[Server, float, bytes, str, Header, memoryview], Effects],
    self: Server,
    now: float,
    route: bytes,
    user: str,
    header: Header,
    payload: memoryview,
) -> Effects:
    try:
        return right(self, now, route, user, header, payload)
    except OURS as mistake:
        self.drop(f"contents of another form ({type(mistake).__name__})")
        return []


@replaces(
    Loop.message,
    killed_by=test_own_mistakes.test_a_coordinators_own_mistake_is_no_bad_message,
    noticed_by=(ControlError,),
    mistake=AssertionError,
)
def a_coordinators_own_mistake_counts_as_a_bad_message(
    right: Callable[[Loop, Peer, Message], None], self: Loop, sender: Peer, message: Message
) -> None:
    try:
        right(self, sender, message)
    except OURS as mistake:
        raise ControlError(f"{message.kind}: {mistake}") from mistake


@replaces(
    Membership.end,
    killed_by=test_own_mistakes.test_a_server_without_the_optimizers_class_ends_and_names_it,
    noticed_by=(TimeoutError,),
)
def a_server_that_fails_leaves_like_one_that_is_done(
    right: Callable[[Membership, str, bool], None], self: Membership, message: str, clean: bool = False
) -> None:
    pass


@replaces(
    CoordinatorService.send,
    killed_by=test_own_mistakes.test_a_failing_coordinator_shows_its_traceback_and_tells_all,
    noticed_by=(TimeoutError,),
)
def a_coordinator_that_fails_tells_nobody(
    right: Callable[[CoordinatorService, Peer, Message], None], self: CoordinatorService, peer: Peer, message: Message
) -> None:
    if message.kind != "ended":
        right(self, peer, message)


@replaces(
    Message.integer,
    killed_by=test_insider_fuzz.test_no_member_makes_a_server_fail,
    noticed_by=(TypeError,),
    options=test_insider_fuzz.MODES["sync"],
)
def what_a_server_takes_for_a_number_may_be_none(
    right: Callable[[Message, str, int], int], self: Message, name: str, least: int = 0
) -> Any:
    return self.fields.get(name)


@replaces(
    Message.table,
    killed_by=test_coordinator_fuzz.test_nothing_that_a_peer_says_fails_later,
    noticed_by=(TypeError, ValueError, IndexError),
)
def what_a_member_reports_may_have_any_form(
    right: Callable[..., list[tuple[Any, ...]]], self: Message, name: str, *columns: type
) -> Any:
    return self.fields.get(name)
