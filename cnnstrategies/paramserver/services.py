"""The processes beside the workers: the coordinator and the servers, forked or started as programs.

A program reads its settings as JSON from its standard input, so that they appear neither in the list of processes nor
in the environment.
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
    """What the supervision needs of a child process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""


class Forked:
    """A process of ``multiprocessing`` as a :class:`Handle`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "it has been started"
        self.process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True)
class CoordinatorProcess:
    """A coordinator to start."""

    settings: CoordinatorSettings
    key_file: str | None = None  # with the run's CURVE keys; None for no encryption
    directory: str | None = None  # the run's, which is removed when the process that started this one is killed
    journal: str | None = None  # its file; None if the coordinator is not started again when it is killed
    follows: bool = False  # it goes on with the journal of one that was killed
    starter: int = field(default_factory=os.getpid)

    def run(self) -> None:
        """Serve until told to stop, or until the one that has started it is gone."""
        journal = None if self.journal is None else JournalFile(Path(self.journal))
        with CoordinatorService(self.settings, load_keys(self.key_file), journal, self.follows) as coordinator:
            coordinator.run(lambda: os.getppid() != self.starter)
        if os.getppid() != self.starter and self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class ServerProcess:
    """A server to start."""

    address: Address
    endpoint: str
    key_file: str | None = None  # with the run's CURVE keys; None for no encryption
    insecure: bool = False  # no encryption although other machines reach the endpoint
    known_as: str | None = None  # name of this machine for the others, where the endpoint does not have it
    starter: int | None = None  # process id of the one that starts this one, which ends with it; None if a shell does

    def run(self) -> None:
        """Serve one run.

        Raises:
            RunEnded: The run cannot go on; the message says why.
            ConfigurationError: It cannot serve this run. As of any other error, all processes of the run are told.
        """
        if self.starter is not None:
            end_with_parent(self.starter)
        # Here: torch makes up most of a program's start, and the coordinator needs none of it.
        import torch

        from cnnstrategies.paramserver.drivers.server import ServerService
        from cnnstrategies.paramserver.drivers.sockets import Listener
        from cnnstrategies.paramserver.specification import Specification

        torch.set_num_threads(1)
        run_keys = load_keys(self.key_file)
        listener = Listener(self.endpoint, encrypted=run_keys is not None, insecure=self.insecure)
        reached = listener.endpoint
        if self.known_as is not None:
            reached = f"tcp://{self.known_as}:{reached.rpartition(':')[2]}"
        membership = Membership(self.address, reached, run_keys)
        views = membership.source()
        pass_on_termination(membership)
        try:
            membership.wait_registered()
            (text,) = membership.ask("get", {}).frames
            specification = Specification.from_json(bytes(text).decode())
            server = ServerService(specification, views, self.address.id, listener, membership.keys, self.insecure)
            membership.tell(server.figures)
            server.run()
        except RunEnded as ended:
            if not ended.clean:
                raise
        except Exception as error:
            # From here, for nobody may watch this process: and to leave without a word is to have done one's part.
            reason = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            membership.end(f"server {self.address.id} failed: {reason}")
            raise
        finally:
            listener.close()
            membership.close()


def load_keys(path: str | None) -> KeyPair | None:
    """The run's keys; None for no encryption."""
    return None if path is None else KeyPair.load(path)


Service = CoordinatorProcess | ServerProcess


def _from_json(text: str) -> Service:
    """The service that :func:`start` has described."""
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
    # -u: what it prints last must not be lost when it is killed.
    command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    program = subprocess.Popen([sys.executable, "-u", "-c", command], stdin=subprocess.PIPE)
    assert program.stdin is not None
    program.stdin.write(json.dumps({"kind": type(service).__name__, **asdict(service)}).encode())
    program.stdin.close()
    return program


def serve(service: Service, dedicated: bool = False) -> int:
    """Run a service in this process until it ends; its exit code.

    One that is `dedicated` says how the run ended: nobody else on its machine does.
    """
    # Terminals and job managers signal all processes: the workers stop after their step, and need this one till then.
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
    except Exception:  # Here, too: at a regular end sockets that are left open could be waited for.
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Serve what the standard input describes."""
    if text := sys.stdin.read():  # Else whoever started this was killed meanwhile.
        serve_and_exit(_from_json(text))


def pass_on_termination(membership: Membership) -> None:
    """Have the run stop with a checkpoint on SIGTERM: this may be the only machine that ends."""
    signal.signal(signal.SIGTERM, lambda signum, frame: membership.stop_all(signum))


def serve_and_exit(service: Service, dedicated: bool = False) -> NoReturn:
    """Run a service, and end the process; see :func:`serve`."""
    code = serve(service, dedicated)
    # Nothing is left to clean up, and at a regular end torch's libraries print what they have not freed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
