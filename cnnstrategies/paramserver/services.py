"""The processes beside the workers: the coordinator and the servers, forked or started as programs.

A program reads its settings as JSON from its standard input, so that the settings appear neither in the list of
processes nor in the environment.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import zmq

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService, JournalFile
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.runtime.processes import end_with_parent, name_process

StartMethod = Literal["fork", "program"]


class Handle(Protocol):
    """A child process, as the supervision needs it; ``subprocess.Popen`` has this interface."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process still runs."""


class Forked:
    """A process of ``multiprocessing`` as a :class:`Handle`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "it has been started"
        self.process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def ending(code: int) -> str:
    """Describe in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True)
class CoordinatorProcess:
    """A coordinator to start.

    Attributes:
        settings: The coordinator's settings.
        key_file: File with the run's CURVE keys; None for no encryption.
        directory: The run's directory, to be removed if the process that started the coordinator is killed.
        journal: The journal's file; None if the coordinator is not started again after it was killed.
        follows: Whether the coordinator continues from the journal of its process that was killed.
        starter: Id of the process that starts the coordinator.
    """

    settings: CoordinatorSettings
    key_file: str | None = None
    directory: str | None = None
    journal: str | None = None
    follows: bool = False
    starter: int = field(default_factory=os.getpid)

    def run(self) -> None:
        """Serve until told to stop, or until the process that started this one is gone."""
        journal = None if self.journal is None else JournalFile(Path(self.journal))
        with CoordinatorService(self.settings, load_keys(self.key_file), journal, self.follows) as coordinator:
            coordinator.run(lambda: os.getppid() != self.starter)
        if os.getppid() != self.starter and self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class ServerProcess:
    """A server to start.

    Attributes:
        address: The server's place and the coordinator's endpoint.
        endpoint: Where the server listens.
        key_file: File with the run's CURVE keys; None for no encryption.
        insecure: Whether encryption may be left out although other machines reach the endpoint.
        known_as: This machine's name for other machines, where the endpoint does not contain it.
        starter: Id of the process that starts the server, which ends with it; None if a shell starts the server.
    """

    address: Address
    endpoint: str
    key_file: str | None = None
    insecure: bool = False
    known_as: str | None = None
    starter: int | None = None

    def run(self) -> None:
        """Serve one run.

        Raises:
            RunEnded: The run cannot go on; the message gives the reason.
            ConfigurationError: The server cannot serve this run. All processes of the run are told of this error, as of
                any other one.
        """
        if self.starter is not None:
            end_with_parent(self.starter)
        # Imported here, because torch takes most of a program's start, and the coordinator does not need it.
        import torch

        from cnnstrategies.paramserver.drivers.server import ServerService
        from cnnstrategies.paramserver.drivers.sockets import Listener
        from cnnstrategies.paramserver.specification import Specification

        torch.set_num_threads(1)
        run_keys = load_keys(self.key_file)
        listener = Listener(self.endpoint, encrypted=run_keys is not None, insecure=self.insecure)
        endpoint = listener.endpoint
        if self.known_as is not None:
            endpoint = f"tcp://{self.known_as}:{endpoint.rpartition(':')[2]}"
        membership = Membership(self.address, endpoint, run_keys)
        views = membership.source()
        pass_on_termination(membership)
        try:
            membership.wait_registered()
            (text,) = membership.ask("get", {}).frames
            specification = Specification.from_json(bytes(text).decode())
            server = ServerService(specification, views, self.address.id, listener, membership.keys, self.insecure)
            membership.report_figures(server.figures)
            server.run()
        except RunEnded as ended:
            if not ended.clean:
                raise
        except Exception as error:
            # Report the failure here, because this process may have no supervision, and a server that leaves without a
            # report counts as finished.
            reason = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            membership.end(f"server {self.address.id} failed: {reason}")
            raise
        finally:
            listener.close()
            membership.close()


def load_keys(path: str | None) -> KeyPair | None:
    """Return the run's keys from a file; None for no encryption."""
    return None if path is None else KeyPair.load(path)


Service = CoordinatorProcess | ServerProcess


def _from_json(text: str) -> Service:
    """Return the service that :func:`start` has described."""
    values: dict[str, Any] = json.loads(text)
    if values.pop("kind") == CoordinatorProcess.__name__:
        return CoordinatorProcess(CoordinatorSettings(**values.pop("settings")), **values)
    return ServerProcess(Address(**values.pop("address")), **values)


def start(service: Service, method: StartMethod) -> Handle:
    """Start the process of a service."""
    if method == "fork":
        context = multiprocessing.get_context("fork")
        process = context.Process(target=lambda: sys.exit(serve(service)), daemon=True)
        process.start()
        return Forked(process)
    # With -u the last lines that the program prints are not lost when it is killed.
    command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    program = subprocess.Popen([sys.executable, "-u", "-c", command], stdin=subprocess.PIPE)
    assert program.stdin is not None
    program.stdin.write(json.dumps({"kind": type(service).__name__, **asdict(service)}).encode())
    program.stdin.close()
    return program


def serve(service: Service, dedicated: bool = False) -> int:
    """Run a service in this process until it ends. Return the exit code.

    A `dedicated` server prints how the run ended, because no other process on its machine does.
    """
    # Terminals and job managers signal all processes. The workers stop after their step, and need this process until
    # then.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
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
    except Exception:  # Handled here, because a regular interpreter exit could wait for sockets that are still open.
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Serve the service that the standard input describes."""
    if text := sys.stdin.read():  # The text is empty if the starting process was killed meanwhile.
        serve_and_exit(_from_json(text))


def pass_on_termination(membership: Membership) -> None:
    """Stop the whole run with a checkpoint on SIGTERM, because this may be the only machine that ends."""
    signal.signal(signal.SIGTERM, lambda signum, frame: membership.stop_all(signum))


def serve_and_exit(service: Service, dedicated: bool = False) -> NoReturn:
    """Run a service, and end the process; see :func:`serve`."""
    code = serve(service, dedicated)
    # Nothing is left to clean up, and in a regular exit torch's libraries print warnings about memory that they have
    # not freed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
