"""Mutants of error handling: messages are checked on arrival; later errors are the package's own and are reported."""

from cnnstrategies.paramserver.core.node import ControlError, Message
from cnnstrategies.paramserver.drivers.control import Loop
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.server.server import Server
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_insider_fuzz, test_own_mistakes

OURS = (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


@replaces(
    Server.on_message,
    killed_by=test_own_mistakes.test_a_roles_own_mistake_is_not_taken_for_a_bad_message,
    mistake=KeyError,
)
def a_servers_own_mistake_counts_as_a_bad_message(original, self, now, route, user, header, payload):
    try:
        return original(self, now, route, user, header, payload)
    except OURS as mistake:
        self.drop(f"contents of another form ({type(mistake).__name__})")
        return []


@replaces(
    Loop.message,
    killed_by=test_own_mistakes.test_a_roles_own_mistake_is_not_taken_for_a_bad_message,
    noticed_by=(ControlError,),
    mistake=AssertionError,
)
def a_coordinators_own_mistake_counts_as_a_bad_message(original, self, sender, message):
    try:
        original(self, sender, message)
    except OURS as mistake:
        raise ControlError(f"{message.kind}: {mistake}") from mistake


removes(
    Membership.end,
    "a failing server leaves like a server that has finished",
    killed_by=test_own_mistakes.test_a_server_without_the_optimizers_class_ends_and_names_it,
    noticed_by=(TimeoutError,),
)


@replaces(
    CoordinatorService.send,
    killed_by=test_own_mistakes.test_a_failing_coordinator_shows_its_traceback_and_tells_all,
    noticed_by=(TimeoutError,),
)
def a_failing_coordinator_does_not_send_the_runs_end(original, self, peer, message):
    if message.kind != "ended":
        original(self, peer, message)


@replaces(
    Message.integer,
    killed_by=test_insider_fuzz.test_no_message_of_a_member_makes_a_server_fail,
    noticed_by=(TypeError,),
    options=test_insider_fuzz.MODES["async"],
)
def a_server_accepts_none_in_place_of_an_integer(original, self, name, least=0):
    return self.fields.get(name)


@replaces(
    Message.table,
    killed_by=test_insider_fuzz.test_no_message_of_a_peer_makes_a_role_fail,
    noticed_by=(TypeError, ValueError, IndexError),
    takes_long=True,
)
def a_members_report_is_accepted_in_any_form(original, self, name, *columns):
    return self.fields.get(name)
