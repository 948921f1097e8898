"""Starting the processes of the coordinator and the servers, by a fork or as new programs.

A new program reads its settings as JSON from standard input, so the settings do not appear in the process list or in
the environment.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import zmq

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded, ViewSource
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService, JournalFile
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.runtime.helper_processes import blocked_start, unshielded_start
from cnnstrategies.runtime.memory_records import MemoryRecord
from cnnstrategies.runtime.out_of_memory import OutOfMemory, held_bytes, is_out_of_memory, line_of
from cnnstrategies.runtime.processes import end_with_parent, name_process
from cnnstrategies.runtime.stop_signals import BLOCKED, acting_on, settle

if TYPE_CHECKING:
    from cnnstrategies.paramserver.drivers.sockets import Listener

MEMORY_REMEDY = (
    "use servers on more machines (the strategy's options endpoints and servers_per_node), or an optimizer that keeps "
    "fewer values for each parameter"
)
StartMethod = Literal["fork", "program"]
PassedTo = Callable[[Membership], contextlib.AbstractContextManager[None]]  # See `passed_on_termination`.


class Handle(Protocol):
    """Interface through which the supervision process controls a child process; ``subprocess.Popen`` implements it."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return the exit code of the process; None while the process is running.

        If a signal has killed the process, the exit code is minus the signal's number.
        """

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process is still running."""


class Forked:
    """The :class:`Handle` of a process that was started with ``multiprocessing``."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "the process has been started"
        self.process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return the exit code of the process; None while the process is running.

        If a signal has killed the process, the exit code is minus the signal's number.
        """
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process is still running."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def ending(code: int) -> str:
    """Return a text that says how a process with this exit code has ended, for an error message."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True)
class CoordinatorProcess:
    """Settings of a coordinator's process.

    Attributes:
        settings: The coordinator's settings.
        key_file: Path of the file with the run's CURVE keys; None for no encryption.
        directory: Path of the run's directory for sockets and keys, which the coordinator removes if its parent process
            was killed; None if another process removes this directory.
        journal: Path of the journal; None if a killed coordinator is not replaced.
        follows: Whether this coordinator replaces a killed coordinator, and continues its journal.
        starter: Process id of the parent process.
    """

    settings: CoordinatorSettings
    key_file: str | None = None
    directory: str | None = None
    journal: str | None = None
    follows: bool = False
    starter: int = field(default_factory=os.getpid)

    def run(self) -> None:
        """Serve as the coordinator until the role ends, or until the parent process has ended."""
        journal = None if self.journal is None else JournalFile(Path(self.journal))
        with CoordinatorService(self.settings, load_keys(self.key_file), journal, self.follows) as coordinator:
            coordinator.run(lambda: os.getppid() != self.starter)
        if os.getppid() != self.starter and self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class ServerProcess:
    """Settings of a server's process.

    Attributes:
        address: The server's role and id, and the coordinator's endpoint.
        endpoint: Endpoint to which the server binds its socket.
        key_file: Path of the file with the run's CURVE keys; None for no encryption.
        insecure: Whether other machines may reach the endpoint although the run is not encrypted.
        known_as: Host name or address under which other machines reach this machine; None if the endpoint already
            contains this name or address.
        starter: Process id of the parent process. The server ends when its parent process has ended. None if the server
            must not end with its parent process, for example when the user starts the server from a shell.
    """

    address: Address
    endpoint: str
    key_file: str | None = None
    insecure: bool = False
    known_as: str | None = None
    starter: int | None = None

    def run(self) -> None:
        """Serve as a server of one run until the run has ended.

        Raises:
            RunEnded: The run cannot continue; the error message gives the reason.
            ConfigurationError: The server cannot serve this run. All processes of the run receive this error message,
                as they do for any other exception.
        """
        with passed_on_termination() as passed_to_coordinator:
            self._run(passed_to_coordinator)

    def _run(self, passed_to_coordinator: PassedTo) -> None:
        if self.starter is not None:
            end_with_parent(self.starter)
        # torch is imported here and not at the top of the file, because the import takes most of the time to start a
        # program, and the coordinator does not need torch.
        import torch

        from cnnstrategies.paramserver.drivers.sockets import Listener

        torch.set_num_threads(1)
        run_keys = load_keys(self.key_file)
        listener = Listener(self.endpoint, encrypted=run_keys is not None, insecure=self.insecure)
        endpoint = listener.endpoint
        if self.known_as is not None:
            endpoint = f"tcp://{self.known_as}:{endpoint.rpartition(':')[2]}"
        membership = Membership(self.address, endpoint, run_keys)
        views = membership.source()
        record = MemoryRecord(MEMORY_REMEDY)
        try:
            with passed_to_coordinator(membership):
                membership.wait_registered()
                while self._serve(membership, views, listener, record):
                    pass  # Parameters were added to the optimizer, so the server begins again without values.
        except RunEnded as ended:
            if not ended.clean:
                if membership.participant.unheard and self.starter is not None:
                    # No other process knows this reason. The supervision only sees that this process has ended.
                    print(f"server {self.address.id} ends: {ended}", file=sys.stderr, flush=True)
                raise
        except Exception as error:
            # Report the failure here, because there may be no supervision process that reports it. A server that leaves
            # without a report counts as finished.
            name = f"server {self.address.id}"
            reason = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            if is_out_of_memory(error):
                held = f"{held_bytes() / 1e6:,.0f} MB"
                OutOfMemory(name, socket.gethostname(), record.step, held, "", MEMORY_REMEDY).attach(error)
                # This process prints the whole line. Each rank prints the reason, and shares the output of this process
                # unless the server was started by itself.
                reason = "it has run out of memory" if self.starter is not None else str(line_of(error))
            membership.end(f"{name} failed: {reason}")
            raise
        finally:
            listener.close()
            membership.close()

    def _serve(self, membership: Membership, views: ViewSource, listener: "Listener", record: MemoryRecord) -> bool:
        """Serve with the newest specification. Return whether another specification has replaced it meanwhile."""
        from cnnstrategies.paramserver.drivers.server import ServerService
        from cnnstrategies.paramserver.specification import Specification
        from cnnstrategies.runtime.stalls import ServerStallWatch

        specification = Specification.from_json(membership.specification(views.current().specification))
        server = ServerService(specification, views, self.address.id, listener, membership.keys, self.insecure)

        def figures() -> dict[str, float]:
            newest = server.figures()
            record.write(int(newest["step"]))
            return newest

        membership.report_figures(figures)
        stalls = ServerStallWatch(self.address.id, Path("stalls")).start()
        try:
            server.run(stalls.move)
        finally:
            stalls.close()
            figures()  # An error that is raised now names the step in which it has occurred.
        membership.report_figures(dict)  # The next server needs the memory of this one.
        return server.is_outdated


def load_keys(path: str | None) -> KeyPair | None:
    """Load the run's keys from a file. Return None if `path` is None, because the run is then not encrypted."""
    return None if path is None else KeyPair.load(path)


Service = CoordinatorProcess | ServerProcess


def _from_json(text: str) -> Service:
    """Decode the settings of a service from the JSON that :func:`start` writes."""
    values: dict[str, Any] = json.loads(text)
    if values.pop("kind") == CoordinatorProcess.__name__:
        return CoordinatorProcess(CoordinatorSettings(**values.pop("settings")), **values)
    return ServerProcess(Address(**values.pop("address")), **values)


def start(service: Service, method: StartMethod) -> Handle:
    """Start a service in a new process.

    Args:
        service: Settings of the service.
        method: ``fork`` to fork this process; ``program`` to start a new Python program.
    """
    with blocked_start(), unshielded_start():
        return _start(service, method)


def _start(service: Service, method: StartMethod) -> Handle:
    if method == "fork":
        context = multiprocessing.get_context("fork")
        process = context.Process(target=lambda: sys.exit(serve(service)), daemon=True)
        process.start()
        return Forked(process)
    # With -u, output is not buffered, so the last lines are not lost when the program is killed.
    command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    program = subprocess.Popen([sys.executable, "-u", "-c", command], stdin=subprocess.PIPE)
    assert program.stdin is not None
    program.stdin.write(json.dumps({"kind": type(service).__name__, **asdict(service)}).encode())
    program.stdin.close()
    return program


def serve(service: Service, dedicated: bool = False) -> int:
    """Run a service in this process until it ends, and return the exit code.

    Args:
        service: Settings of the service.
        dedicated: Whether the service is a server on a machine without workers. Such a server prints why the run ended,
            because no other process on its machine does.
    """
    # Terminals and job schedulers send signals to all processes of a job. A coordinator or a server ignores these
    # signals, because the workers need it until they have finished their current step. But a server passes SIGTERM on.
    # If SIGTERM has already arrived, it waits until the server unblocks it, and SIG_IGN would discard it.
    ignored = set(BLOCKED) - ({signal.SIGTERM} if isinstance(service, ServerProcess) else set())
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)  # They were blocked because a terminal may send them earlier.
    name_process(f"ps-server-{service.address.id}" if isinstance(service, ServerProcess) else "ps-coordinator")
    try:
        service.run()
    except RunEnded as ended:
        assert isinstance(service, ServerProcess)
        if dedicated:
            print(f"server {service.address.id} ends: {ended}", file=sys.stderr, flush=True)
        return 1
    except (ConfigurationError, OSError, zmq.ZMQError) as error:
        print(f"{type(service).__name__} cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    # Catch all exceptions: after an uncaught exception, the interpreter could wait for open sockets when it exits.
    except Exception as error:
        if (line := line_of(error)) is None:
            traceback.print_exc()
        else:
            print(line, file=sys.stderr, flush=True)
        return 1
    return 0


def main() -> None:
    """Run the service whose settings are read from standard input."""
    # If the parent process was killed before it wrote the settings, the text is empty, and there is nothing to do.
    if text := sys.stdin.read():
        serve_and_exit(_from_json(text))


@contextlib.contextmanager
def passed_on_termination() -> Iterator[PassedTo]:
    """Return a context in which SIGTERM makes the coordinator stop the whole run with a checkpoint.

    The coordinator must be told because the signal may reach only this machine, for example when a single node is shut
    down. Inside the context SIGTERM is not blocked, and after the context it is ignored.

    Yields:
        Function that returns a context in which signals are passed on over this process's membership. A signal that has
        arrived earlier, for example while torch was imported, is passed on at the beginning of this context.
    """
    received: list[int] = []
    memberships: list[Membership] = []

    def pass_on() -> None:
        # Two threads call this, each after it has filled its list, so at least the later call finds both filled. If
        # both calls find this, the coordinator is told twice, which has no further effect.
        for membership in memberships[:] if received else ():
            membership.stop_all(received[0])

    def on_signal(signum: int) -> None:
        received.append(signum)
        pass_on()

    @contextlib.contextmanager
    def passed_to(membership: Membership) -> Iterator[None]:
        memberships.append(membership)
        pass_on()
        try:
            yield
        finally:
            memberships.clear()
            settle()  # The caller may close the membership now.

    with acting_on([signal.SIGTERM], on_signal):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        try:
            yield passed_to
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def serve_and_exit(service: Service, dedicated: bool = False) -> NoReturn:
    """Run a service, and end the process; see :func:`serve`."""
    code = serve(service, dedicated)
    # The process has nothing left to clean up. With a regular exit, torch's libraries would print warnings about memory
    # that is not freed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
