"""Messages are checked at the edge, and what fails behind it is a mistake that is heard of."""

import test_insider_fuzz
import test_own_mistakes
from mutants.faulty import removes, replaces

from cnnstrategies.paramserver.core.node import ControlError, Message
from cnnstrategies.paramserver.drivers.control import Loop
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.server.server import Server

OURS = (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


@replaces(Server.on_message, killed_by=test_own_mistakes.test_a_roles_own_mistake_is_no_bad_message, mistake=KeyError)
def a_servers_own_mistake_counts_as_a_bad_message(right, self, now, route, user, header, payload):
    try:
        return right(self, now, route, user, header, payload)
    except OURS as mistake:
        self.drop(f"contents of another form ({type(mistake).__name__})")
        return []


@replaces(
    Loop.message,
    killed_by=test_own_mistakes.test_a_roles_own_mistake_is_no_bad_message,
    noticed_by=(ControlError,),
    mistake=AssertionError,
)
def a_coordinators_own_mistake_counts_as_a_bad_message(right, self, sender, message):
    try:
        right(self, sender, message)
    except OURS as mistake:
        raise ControlError(f"{message.kind}: {mistake}") from mistake


removes(
    Membership.end,
    "a server that fails leaves like one that is done",
    killed_by=test_own_mistakes.test_a_server_without_the_optimizers_class_ends_and_names_it,
    noticed_by=(TimeoutError,),
)


@replaces(
    CoordinatorService.send,
    killed_by=test_own_mistakes.test_a_failing_coordinator_shows_its_traceback_and_tells_all,
    noticed_by=(TimeoutError,),
)
def a_coordinator_that_fails_tells_nobody(right, self, peer, message):
    if message.kind != "ended":
        right(self, peer, message)


@replaces(
    Message.integer,
    killed_by=test_insider_fuzz.test_no_member_makes_a_server_fail,
    noticed_by=(TypeError,),
    options=test_insider_fuzz.MODES["async"],
)
def what_a_server_takes_for_a_number_may_be_none(right, self, name, least=0):
    return self.fields.get(name)


@replaces(
    Message.table,
    killed_by=test_insider_fuzz.test_nothing_that_a_peer_says_fails_later,
    noticed_by=(TypeError, ValueError, IndexError),
)
def what_a_member_reports_may_have_any_form(right, self, name, *columns):
    return self.fields.get(name)
