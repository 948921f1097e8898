"""The real roles of workers and servers as processes of a simulated world, with their drivers' work in virtual time."""

from collections.abc import Callable, Generator
from typing import Any

import torch

from cnnstrategies.paramserver.core.node import Call, Effect, End, Message, Peer, Send, Timer
from cnnstrategies.paramserver.core.node import Effects as NodeEffects
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError, View
from cnnstrategies.paramserver.messages import Effects, Encoding, Header, Kind, Parcel
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.connections import Wait
from cnnstrategies.paramserver.worker.worker import WorkerRole
from tests.paramserver.simulation.data.watch import Watch, gradient, rate
from tests.paramserver.simulation.plane import ViolationError
from tests.paramserver.simulation.world import World

LOOK_SERVER, LOOK_WORKER = 0.2, 0.05  # Seconds between two looks of the drivers at the time.
_NAMES = {kind: kind.name for kind in Kind}
Draw = Callable[[float, float], float]
"""A function that draws a number of seconds between two bounds."""
Steps = Generator[Wait | float, None, None]


class Wires:
    """The current connection between each worker and each server. Answers on an older connection are lost."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Peer, Peer], int] = {}
        self._routes: dict[tuple[Peer, Peer], bytes] = {}
        self._workers: dict[bytes, Peer] = {}

    def cut(self, first: Peer, second: Peer) -> None:
        """End the connection between a worker and a server: with TCP, a lost message means a lost connection."""
        worker, server = (first, second) if first.role == "worker" else (second, first)
        self._numbers[worker, server] = self._numbers.get((worker, server), 0) + 1
        self._routes.pop((worker, server), None)

    def route(self, worker: Peer, server: Peer) -> bytes:
        """Return the server's name for the worker's current connection."""
        route = self._routes.get((worker, server))
        if route is None:
            route = f"{worker.id}.{worker.incarnation}.{self._numbers.get((worker, server), 0)}".encode()
            self._routes[worker, server], self._workers[route] = route, worker
        return route

    def worker(self, route: bytes, server: Peer) -> Peer | None:
        """Return the worker at the other end of a connection; None if the connection has ended."""
        peer = self._workers[route]
        return peer if self.route(peer, server) == route else None


def _message(header: Header, payload: Any, sent: float, route: bytes = b"") -> Message:
    return Message(_NAMES[header.kind], {"header": header, "sent": sent, "route": route}, (bytes(payload),))


class _Incarnations:
    """Cache of the servers' incarnations in the last view."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._incarnations: dict[int, int] = {}

    def of(self, view: View) -> dict[int, int]:
        """Return the servers' incarnations in a view, by server id."""
        if view is not self._view:
            self._view, self._incarnations = view, {server.id: int(server.endpoint) for server in view.servers}
        return self._incarnations


class SimulatedServer:
    """The process of a server."""

    def __init__(self, server: Server, peer: Peer, world: World, wires: Wires, seconds: Draw) -> None:
        self.server = server
        self._world = world
        self._peer = peer
        self._wires = wires
        self._seconds = seconds
        self._slow = seconds(0.0, 1.0) ** 6 * 0.03
        self._working = False
        self._incarnations = _Incarnations()

    def start(self, now: float) -> NodeEffects:
        """Set the first timer."""
        return [Timer("look", now)]

    def on_message(self, now: float, sender: Peer, message: Message) -> NodeEffects:
        """Handle a message of the data plane."""
        header, route = message.fields["header"], message.fields["route"]
        payload = memoryview(bytearray(message.frames[0]))
        effects = self.server.on_message(now, route, "", header, payload)
        return self._act(now, effects + self.server.flush())

    def on_timer(self, now: float, name: str) -> NodeEffects:
        """Look at the time, or work."""
        if name == "look":
            return [*self._act(now, self.server.on_time(now)), Timer("look", now + LOOK_SERVER)]
        self._working = False
        return self._act(now, self.server.work() if self.server.busy else [])

    def on_call(self, now: float, call: Call) -> NodeEffects:
        """Take up a view."""
        return self._act(now, self.server.follow(now, call.fields["view"]))

    def _act(self, now: float, effects: Effects) -> NodeEffects:
        done: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Parcel):
                to = self._receiver(effect.to)
                if to is not None:
                    done.append(Send(to, _message(effect.header, effect.payload, self._world.now)))
            elif isinstance(effect, End):
                done.append(effect)
            else:
                self._world.note(effect.text)
                if "dropped a message" in effect.text:  # All members are correct here.
                    raise ViolationError(16, f"{effect.text}")
        if self.server.busy and not self._working:
            self._working = True
            done.append(Timer("work", now + self._slow + self._seconds(0.0, 0.002)))
        return done

    def _receiver(self, to: int | bytes) -> Peer | None:
        if isinstance(to, bytes):
            return self._wires.worker(to, self._peer)
        return Peer("server", to, self._incarnations.of(self.server.view)[to])


class SimulatedWorker:
    """The process of a worker, which trains some steps with known gradients."""

    def __init__(
        self,
        specification: Specification,
        slices: tuple[Slice, ...],
        peer: Peer,
        steps: int,
        world: World,
        wires: Wires,
        watch: Watch,
        seconds: Draw,
        progress: Callable[[Peer, int], None],
    ) -> None:
        self.values = [torch.zeros(info.shape, dtype=torch.float64) for info in specification.parameters]
        self.role = WorkerRole(specification, slices, self.values, peer.id, peer.incarnation)
        self.joined = False
        self._specification = specification
        self._slices = slices
        self._local = specification.mode == "local"
        self._peer = peer
        self._steps = steps
        self._world = world
        self._wires = wires
        self._watch = watch
        self._seconds = seconds
        self._progress = progress
        self._now = 0.0
        self._program = self._train()
        self._wait: Wait | None = None
        self._inbox: list[tuple[Peer, Message]] = []
        self._view: View | None = None
        self._incarnations = _Incarnations()
        self._arrived: dict[int, int] = {}  # By key of a slice: step whose values have arrived.

    # Program

    def _train(self) -> Steps:
        role, groups = self.role, self._specification.groups
        yield self._seconds(0.0, 0.2)
        # A real worker takes part in a collective before it contacts servers. The collective's result names the view to
        # begin with. Until then the worker waits for the coordinator.
        yield Wait(lambda: role.view.number < 0)
        begins = self._peer.id < self._specification.workers and self._peer.incarnation == 0
        if begins or self._watch.highest < 0:  # Replacements and joiners use the servers' values.
            role.initialise(None)
        yield from role.join(self._now)
        self.joined, trained = True, False
        while role.step < self._steps:
            yield role.all_here()
            self._progress(self._peer, role.step)
            step = role.step
            old = [slice_.key for slice_ in self._slices if self._arrived.get(slice_.key, -1) < step]
            if old and trained:
                raise ViolationError(15, f"worker {self._peer.id} begins step {step} with older values of slices {old}")
            if self._specification.pull_compression == "auto":  # Most choices are the same for all workers.
                others = step % 4 > 0
                changes = others == (self._seconds(0.0, 1.0) < 0.8)
                role.encode_as("none", "onebit" if changes else "none", int(changes))
            role.begin_step([{**groups[0].options, "lr": rate(step)}], 1.0)
            for index in reversed(range(len(self.values))):
                brought = gradient(self._peer.id, step, self._peer.incarnation)
                # In mode local the worker makes a local step and pushes the values after it.
                role.push(index, self.values[index].sub_(brought) if self._local else brought)
                yield self._seconds(0.0, 0.01)
            yield self._seconds(0.0, 0.06)
            role.end_step()
            for index in range(len(self.values)):
                yield role.here(index)
            trained = True
        self.joined = False
        yield from role.leave()

    # Events

    def start(self, now: float) -> NodeEffects:
        """Start the program."""
        self._now = now
        return self._advance(now)

    def on_message(self, now: float, sender: Peer, message: Message) -> NodeEffects:
        """Handle a message of the data plane."""
        incarnations = self._incarnations.of(self.role.view)
        if incarnations.get(sender.id) != sender.incarnation or not self.role.connections.heard(
            now, sender.id, message.fields["header"]
        ):
            return []
        self._inbox.append((sender, message))
        return self._waited(now)

    def on_call(self, now: float, call: Call) -> NodeEffects:
        """Take up a view."""
        view = call.fields["view"]
        if self._view is None or view.number > self._view.number:
            self._view = view
        return self._waited(now)

    def on_timer(self, now: float, name: str) -> NodeEffects:
        """Go on after a computation, or look at the time."""
        if name == "computed":
            return self._advance(now)
        if self._wait is None:
            return []
        effects = self._waited(now, look=True)
        return [*effects, Timer("look", now + LOOK_WORKER)] if self._wait is not None else effects

    def _waited(self, now: float, look: bool = False) -> NodeEffects:
        """Handle the view and the messages that have arrived, if this worker waits."""
        self._now = now
        try:
            if self._wait is None:
                return []
            self._follow()
            if look:
                self.role.on_time(now)
            while self._inbox and self._wait.waiting():
                sender, message = self._inbox.pop(0)
                self._handle(sender, message)
            done = not self._wait.waiting()
        except (ServersUnreachableError, RemovedError) as error:
            return [End(str(error), False)]
        return self._advance(now) if done else self._send()

    def _follow(self) -> None:
        if self._view is not None and self._view.number > self.role.view.number:
            self.role.follow(self._view)
            incarnations = self._incarnations.of(self.role.view)
            self._inbox = [
                (sender, message)
                for sender, message in self._inbox
                if incarnations.get(sender.id) == sender.incarnation
            ]

    def _handle(self, server: Peer, message: Message) -> None:
        header: Header = message.fields["header"]
        payload = memoryview(bytearray(message.frames[0]))
        pulls = self.role.pulls
        waited = header.kind == Kind.PULLED and header.key in pulls.pending and header.step == pulls.step
        whole = pulls.refreshing
        self.role.on_message(server.id, header, payload)
        if waited and header.key not in pulls.pending:
            self._arrived[header.key] = header.step
        if waited and header.key not in pulls.pending and header.encoding != Encoding.NOTHING:
            value = self.values[self._slices[header.key].parts[0].parameter]  # Each parameter has one slice.
            self._watch.received(self._peer, header, value, whole, server, message.fields["sent"], self._world.now)

    def _advance(self, now: float) -> NodeEffects:
        """Run the program up to its next wait or computation."""
        self._now = now
        self._wait = None
        try:
            while True:
                wanted = next(self._program)
                if isinstance(wanted, float):
                    return [*self._send(), Timer("computed", now + wanted)]
                if wanted.waiting():
                    self._wait = wanted
                    self.role.begin_waiting(now, wanted)
                    return [*self._send(), Timer("look", now)]
        except StopIteration:
            return [*self._send(), End("it has finished", True)]
        except (ServersUnreachableError, RemovedError) as error:
            return [End(str(error), False)]

    def _send(self) -> NodeEffects:
        sends: NodeEffects = []
        incarnations = self._incarnations.of(self.role.view)
        for parcel in self.role.connections.take():
            assert isinstance(parcel.to, int)
            to = Peer("server", parcel.to, incarnations[parcel.to])
            route = self._wires.route(self._peer, to)
            sends.append(Send(to, _message(parcel.header, parcel.payload, self._world.now, route)))
        return sends
