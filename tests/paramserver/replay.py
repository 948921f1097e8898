"""Traces of a whole run: its real processes, forked, with their sockets, coordinator and supervision.

Each process counts what it sends, and plays its faults itself, so no moment depends on how fast the machine is. Kinds
are those of `messages.Kind` between workers and servers, those of the control plane in small letters.
A slow machine may ask twice, so a moment may come earlier than on a fast one: what is promised holds all the same. A
process that is started again plays nothing. ``stop`` is for a moment.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq
from simulation.traces import Cue, Cues, name
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.drivers.control import Line
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.links import Links
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.drivers.sockets import reconnect
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.messages import Parcel
from cnnstrategies.paramserver.places import RunAddress, find_place
from cnnstrategies.paramserver.services import CoordinatorProcess, Forked, Handle, ServerProcess, load_keys, serve
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.paramserver.supervision import COORDINATOR, POLL, Supervision, Watched
from cnnstrategies.paramserver.worker import worker as worker_role
from cnnstrategies.runtime.processes import end_with_parent, is_stopped

SIZES = (24, 16, 8)
STEPS, EPOCH = 6, 3
SLICE = 8  # elements
TIMEOUT = 40.0  # seconds: no trace waits for it, however slow the machine
HEARTBEAT = 0.1
PAUSE = 0.3  # seconds of a process that is stopped
LEAVES = 0.2  # seconds in which what was sent last has left
_context = multiprocessing.get_context("fork")


class Player:
    """Plays the faults of this process."""

    def __init__(self, who: str, cues: Sequence[Cue], directory: Path) -> None:
        self._who = who
        self._all = list(cues)
        self._cues = Cues([cue for cue in cues if cue.who == who])
        self._directory = directory
        self._connected: dict[str, zmq.Socket[bytes]] = {}

    def fate(self, kind: str, to: str) -> str:
        """What is to happen when a message is sent; mostly nothing."""
        cue = self._cues.sends(self._who, kind, to)
        if cue is None:
            return ""
        (self._directory / f"met {self._all.index(cue)}").touch()
        return cue.moment.kind

    def play(self, fate: str, to: str, send: Callable[[], None]) -> None:
        """Send a message, or do what is to happen instead."""
        if fate == "last":
            send()
            time.sleep(LEAVES)
        if fate in ("kill", "last"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fate == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fate == "cut":
            place = to.replace(" ", "-")
            reconnect([socket for endpoint, socket in self._connected.items() if f"/{place}" in endpoint][-1])
        if fate not in ("lost", "cut"):
            send()

    # Where messages leave

    def watch(self) -> None:
        """Stand between the roles of this process and its sockets."""
        # As at any other interval, but a test need not wait for it.
        worker_role.PROBE_SECONDS = 0.1
        connect = zmq.Socket.connect
        act, send, say, tell = ServerService.act, Links.send, Line.send, CoordinatorService.send

        def note(socket: zmq.Socket[bytes], endpoint: str) -> Any:
            self._connected[endpoint] = socket
            return connect(socket, endpoint)

        def of_server(service: ServerService, effects: Any) -> None:
            for effect in effects:
                if isinstance(effect, Parcel):
                    to = f"server {effect.to}" if isinstance(effect.to, int) else _worker(service, effect.to)
                    fate = self.fate(effect.header.kind.name, to)
                    one = effect._replace(wait=effect.wait and not fate)
                    self.play(fate, to, partial(act, service, [one]))
                else:
                    act(service, [effect])

        def of_worker(links: Links, parcels: Any) -> None:
            for parcel in parcels:
                to = f"server {parcel.to}"
                fate = self.fate(parcel.header.kind.name, to)
                one = parcel._replace(wait=parcel.wait and not fate)
                self.play(fate, to, partial(send, links, [one]))

        def of_member(line: Line, message: Any) -> None:
            self.play(self.fate(message.kind, COORDINATOR), COORDINATOR, partial(say, line, message))

        def of_coordinator(service: CoordinatorService, peer: Any, message: Any) -> None:
            self.play(self.fate(message.kind, name(peer)), name(peer), partial(tell, service, peer, message))

        zmq.Socket.connect = note  # type: ignore[method-assign]
        ServerService.act, Links.send = of_server, of_worker  # type: ignore[method-assign]
        Line.send, CoordinatorService.send = of_member, of_coordinator  # type: ignore[method-assign]


def _worker(service: ServerService, route: Any) -> str:
    return next(f"worker {worker}" for worker, known in service.role.routes.items() if known == route)


# The run


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        restarts: How often each process that is killed is started again; the coordinator: `coordinates`.
        returns: Whether one of these is a worker other than rank 0, for which the others wait by themselves.
        joins: Whether a worker joins them between two epochs.
    """

    workers: int = 2
    servers: int = 2
    restarts: int = 0
    coordinates: int = 0
    returns: bool = False
    joins: bool = False
    mode: str = "sync"
    replication: int = 1
    staleness: int = 0
    clip_norm: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Of the specification."""
        given = {name: getattr(self, name) for name in ("mode", "replication")}
        given |= {"staleness": self.staleness} if self.mode == "ssp" else {}
        return given | ({"clip_norm": self.clip_norm} if self.clip_norm else {})

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.SGD:
        """With momentum where the order of the gradients does not matter."""
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5 if self.mode in ("sync", "local") else 0.0)


def zeros() -> list[nn.Parameter]:
    """What training begins with."""
    return [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in SIZES]


def rate(step: int) -> float:
    """The learning rate: not the same in any two steps that follow each other."""
    return 0.25 if step % 2 else 0.125


def gradient(worker: int, step: int, size: int) -> Tensor:
    """Of a worker in a step: small whole numbers, whose sums are exact in any order."""
    return torch.arange(size, dtype=torch.float64) % 4 + (1 + worker) * (1 + step)


def expected(plan: Plan, members: Callable[[int], Sequence[int]]) -> list[Tensor]:
    """What one process makes of the gradients of some workers in each step; a step without any is left out."""
    parameters = zeros()
    optimizer = plan.optimizer(parameters)
    for step in range(STEPS):
        if not members(step):
            continue
        for parameter in parameters:
            total = torch.stack([gradient(worker, step, len(parameter)) for worker in members(step)]).sum(0)
            parameter.grad = total / len(members(step)) if plan.mode in ("sync", "local") else total
        optimizer.param_groups[0]["lr"] = rate(step)
        if plan.clip_norm:
            nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How it went: of workers that came to the end the parameters and their times, of others what they were told."""

    values: dict[int, list[Tensor]]
    errors: dict[int, str]
    output: str
    times: dict[int, list[float]]


class Places:
    """Where the processes of a run listen: sockets in its directory.

    Attributes:
        timeout: The run's.
        limit: Seconds in which it must end.
        key_file: With the run's keys; None for no encryption.
        known_as: Name of this machine for the others.
    """

    timeout = TIMEOUT
    limit = 60.0
    key_file: str | None = None
    known_as: str | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def listens(self, who: str) -> str:
        """The endpoint of a process."""
        return f"ipc://{self.directory}/{who}"

    def reached(self, endpoint: str) -> str:
        """How others reach it."""
        return endpoint


def replay(plan: Plan, cues: Sequence[Cue], places: Places) -> Outcome:
    """Run a plan; every one of its moments must come."""
    directory, timeout, key_file = places.directory, places.timeout, places.key_file
    log = (directory / "log").open("w+b")
    listens = places.listens(COORDINATOR)
    address = Address(places.reached(listens), "supervision", 0, 0, HEARTBEAT, timeout)
    options = {"timeout": timeout, "slice_bytes": 8 * SLICE, "servers": plan.servers, **plan.options}
    started = zeros()
    named = [(str(number), parameter) for number, parameter in enumerate(started)]
    specification = Specification.of(named, plan.optimizer(started), plan.workers, **options)

    def fork(who: str, main: Callable[[int], int], life: int) -> Handle:
        def child() -> None:
            end_with_parent(parent)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            torch.set_num_threads(1)
            Player(who, () if life else cues, directory).watch()
            os._exit(main(life))

        parent = os.getpid()
        process = _context.Process(target=child)
        process.start()
        return Forked(process)

    def serve_one(number: int, life: int) -> int:
        own = dataclasses.replace(address, role="server", id=number, incarnation=life)
        return serve(ServerProcess(own, places.listens(f"server-{number}-{life}"), key_file, False, places.known_as))

    def work_one(number: int, life: int) -> int:
        own = dataclasses.replace(address, role="worker", id=number, incarnation=life)
        return work(plan, own, specification, places)

    def join() -> int:
        place = find_place(RunAddress(address.coordinator, key_file), places.limit)
        own = dataclasses.replace(address, role="worker", id=place.id, incarnation=place.life)
        return work(plan, own, specification, places)

    supervision = Supervision(address, load_keys(key_file))
    settings = CoordinatorSettings(
        listens, plan.workers, plan.servers, timeout, survivable=specification.replication - 1,
        supervised=plan.restarts + plan.coordinates > 0, supervisor=supervision.process,
        elastic=int(plan.joins),
    )  # fmt: skip
    coordinator = CoordinatorProcess(settings, key_file, journal=f"{directory}/journal" if plan.coordinates else None)

    def coordinate(life: int) -> int:
        return serve(dataclasses.replace(coordinator, follows=life > 0))

    with supervision:
        supervision.start(Watched(COORDINATOR, 0, partial(fork, COORDINATOR, coordinate), plan.coordinates))
        for number in range(plan.servers):
            main = partial(serve_one, number)
            restarts = plan.restarts if specification.replication > 1 else 0
            supervision.start(Watched("server", number, partial(fork, f"server {number}", main), restarts))
        for number in range(plan.workers):
            main = partial(work_one, number)
            supervision.start(Watched("worker", number, partial(fork, f"worker {number}", main), plan.restarts))
        joiners = [fork("joiner", lambda life: join(), 0)] if plan.joins else []
        with _go_on(supervision, places.limit) as tick:
            supervision.watch(tick)
            while any(one.poll() is None for one in joiners):
                tick()
                time.sleep(POLL)
    log.seek(0)
    output = log.read().decode()
    log.close()
    missed = [cue.text for number, cue in enumerate(cues) if not (directory / f"met {number}").exists()]
    assert not missed, f"did not come: {missed}\n{output}"
    values = {int(path.name[7:]): torch.load(path) for path in directory.glob("values-*")}
    errors = {int(path.name[6:]): json.loads(path.read_text()) for path in directory.glob("error-*")}
    times = {int(path.name[6:]): json.loads(path.read_text()) for path in directory.glob("times-*")}
    return Outcome(values, errors, output, times)


@contextlib.contextmanager
def _go_on(supervision: Supervision, limit: float) -> Iterator[Callable[[], None]]:
    """Gives what lets those that were stopped go on after a while."""
    since: dict[int, float] = {}
    deadline = time.monotonic() + limit

    def tick() -> None:
        assert time.monotonic() < deadline, "it goes on for ever"
        for one in supervision.watched:
            if one.code is None and is_stopped(one.handle.pid):
                began = since.setdefault(one.handle.pid, time.monotonic())
                if time.monotonic() - began > PAUSE:
                    one.handle.send_signal(signal.SIGCONT)

    yield tick


def work(plan: Plan, address: Address, specification: Specification, places: Places) -> int:
    """A worker's process, as the strategy has it: it meets the servers, trains, and takes their last values."""
    directory = places.directory
    member = Membership(address, keys=load_keys(places.key_file))
    times, values = [time.monotonic()], [parameter.detach() for parameter in zeros()]
    try:
        for _ in train(plan, member, specification, values):
            times.append(time.monotonic())
    except Exception as error:
        (directory / f"error-{address.id}").write_text(json.dumps(f"{type(error).__name__}: {error}"))
        member.end(f"worker {address.id} failed: {error}")
        member.close(leave=False)
        return 75
    (directory / f"times-{address.id}").write_text(json.dumps(times))
    if address.id < plan.workers:
        torch.save(values, directory / f"values-{address.id}")
    member.close()
    return 0


def meet(plan: Plan, run: Collectives, step: int) -> None:
    """Between two epochs, let in those that have come: if a worker is to return or join, as often as that takes."""
    admitted = run.boundary(step).admitted
    while (plan.returns or plan.joins) and not admitted:
        time.sleep(0.02)
        admitted = run.boundary(step).admitted
    if admitted:
        run.barrier("admitted")


def train(plan: Plan, member: Membership, specification: Specification, values: list[Tensor]) -> Iterator[None]:
    """What a worker does with its membership, to some values; stops after each step, and at the end."""
    run, address = Collectives(member), member.address
    if address.id == 0:
        run.put(specification.to_json())
    started = run.start()
    told = Specification.from_json(run.get())
    worker = Worker(told, values, member.source(), address.id, address.incarnation, member.keys)
    if not started.joined and address.id == 0:
        worker.initialise()
    elif not started.joined:
        worker.stand_in()
    worker.join()
    first = int(started.values[started.leader]) if started.joined else 0
    if started.joined:
        run.barrier("admitted")
    optimizer = plan.optimizer(zeros())
    for step in range(first, STEPS):
        if step == EPOCH and not started.joined:
            meet(plan, run, step)
        optimizer.param_groups[0]["lr"] = rate(step)
        worker.begin_step(hyperparameters(optimizer), 1)
        for index, value in enumerate(values):
            brought = gradient(address.id, step, len(value))
            worker.push(index, value - brought if plan.mode == "local" else brought)
        worker.end_step()
        worker.wait_all()
        yield
    if address.id < plan.workers:  # Who has joined leaves before the others meet.
        run.barrier("trained")
        worker.refresh()
        run.barrier("seen")
    worker.leave()
    worker.close()
    yield
