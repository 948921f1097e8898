"""The driver of a run on Ray: it starts the nodes' programs, passes on what they print, and starts them again."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from cnnstrategies.cluster import run_name
from cnnstrategies.cluster.ray import node as node_module
from cnnstrategies.cluster.ray.connection import in_words
from cnnstrategies.cluster.ray.node import Node, Place
from cnnstrategies.cluster.ray.order import LOST, REFUSED, Clock, Ends, Lines, Order, Patience
from cnnstrategies.errors import ConfigurationError

FOLLOW = 0.5  # Seconds; also how long a signal waits for an actor.
STOPPING = (signal.SIGINT, signal.SIGTERM)


class Driver:
    """Runs an order on a cluster."""

    def __init__(self, ray: Any, order: Order, lines: Lines, clock: Clock = time) -> None:
        self._ray = ray
        self._order = order
        self._lines = lines
        self._clock = clock
        self._signal: int | None = None
        self._told: int | None = None

    def run(self) -> int:
        """Start the run, and start it again when it is lost.

        Returns:
            The exit code: that of the program that failed, or 128 and the signal's number after a signal.

        Raises:
            ConfigurationError: The run cannot start on a node.
        """
        with self._heeding_signals():
            for start in itertools.count():
                ends, why = self._start(start)
                if self._signal is not None:
                    return 128 + self._signal
                if not ends.failed:
                    return 0
                if ends.code == REFUSED:
                    return REFUSED
                if start == self._order.max_restarts:
                    self._lines.say(f"The run cannot go on: {why}, and cluster.ray.max_restarts={start}")
                    return ends.code
                self._lines.say(f"The run starts again ({start + 1} of at most {self._order.max_restarts}): {why}")
        raise AssertionError

    def _start(self, number: int) -> tuple[Ends, str]:
        """One start of the run, until its end."""
        group = self._place()
        if group is None:
            return Ends(), ""
        actors = [self._actor(group, bundle) for bundle in range(self._order.nodes)]
        try:
            places, ends = self._look(actors)
            if not ends.failed:
                self._launch(actors, places, number)
                ends = self._follow(actors, places)
            return ends, ends.why(places)
        finally:
            self._lines.flush()
            for actor in actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)

    def _place(self) -> Any:
        """Nodes of the cluster, each with what the run needs of it; None after a signal.

        Raises:
            ConfigurationError: They have not become free in time.
        """
        order = self._order
        group = self._ray.util.placement_group([order.needed] * order.nodes, "STRICT_SPREAD")
        until = self._clock.monotonic() + order.wait
        told = False
        while not group.wait(1.0):
            if not told:
                self._lines.say(f"Waiting up to {order.wait:g} s for {order.nodes} nodes with {in_words(order.needed)}")
            told = True
            if self._signal is not None or self._clock.monotonic() > until:
                self._ray.util.remove_placement_group(group)
                if self._signal is not None:
                    return None
                raise ConfigurationError(
                    f"{order.nodes} nodes with {in_words(order.needed)} each were not free for {order.wait:g} s: see "
                    "`ray status`, add nodes, or raise cluster.ray.wait"
                )
        return group

    def _actor(self, group: Any, number: int) -> Any:
        strategies = self._ray.util.scheduling_strategies
        self._ray.cloudpickle.register_pickle_by_value(node_module)
        needed = dict(self._order.needed)
        memory = needed.pop("memory", None)
        return (
            self._ray.remote(Node)
            .options(
                num_cpus=needed.pop("CPU"),
                num_gpus=needed.pop("GPU", 0),
                memory=memory,
                resources=needed,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                ),
            )
            .remote()
        )

    def _look(self, actors: list[Any]) -> tuple[list[Place], Ends]:
        """What the nodes say of themselves.

        Raises:
            ConfigurationError: The run cannot start on one of them.
        """
        order, ends = self._order, Ends()
        unknown = Place("unknown", "unknown", 0, None)
        places = [unknown] * len(actors)
        asked = [actor.look.remote(order.config, order.probe) for actor in actors]
        for number, reference in enumerate(asked):
            try:
                places[number] = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                ends.lost.append(number)
        for place in places:
            if place.missing is not None:
                raise ConfigurationError(place.missing)
        return places, ends

    def _launch(self, actors: list[Any], places: list[Place], starts: int) -> None:
        order, main = self._order, places[0]
        meeting = {"MASTER_ADDR": main.address, "MASTER_PORT": str(main.port)}
        variables = {**order.variables, **meeting, **run_name.variables(order.name, starts)}
        self._lines.say(f"Starting on {', '.join(f'{place.host} ({place.address})' for place in places)}")
        for number, actor in enumerate(actors):
            actor.start.remote(order.script, order.directory, {**variables, "NODE_RANK": str(number)})

    def _follow(self, actors: list[Any], places: list[Place]) -> Ends:
        """Pass on what the programs print until all have ended, or some have and the others do not."""
        ray, ends = self._ray, Ends()
        patience = Patience(self._order, places, self._lines, self._clock)
        # What was asked before a failure may be answered by a node that is lost since.
        asked = {actor.follow.remote(FOLLOW): (number, False) for number, actor in enumerate(actors)}
        while asked and not patience.over(ends, [number for number, _ in asked.values()], self._signal is not None):
            self._pass_on(actors, ends)
            done, _ = ray.wait(list(asked), num_returns=1, timeout=1.0)
            for reference in done:
                number, after = asked.pop(reference)
                try:
                    text, code = ray.get(reference)
                    if after:
                        patience.answers(number)
                except ray.exceptions.ActorUnavailableError:
                    # Ray does not know yet whether it has died.
                    self._clock.sleep(0.2)
                    text, code = "", None
                except ray.exceptions.RayActorError:
                    ends.lost.append(number)
                    text, code = "", LOST
                self._lines.add(number, text)
                if code is None:
                    asked[actors[number].follow.remote(FOLLOW)] = (number, ends.failed)
                elif number not in ends.lost:
                    ends.codes[number] = code
        if ends.failed and not ends.lost:
            ends.silent = patience.unheard([number for number, _ in asked.values()])
        return ends

    def _pass_on(self, actors: list[Any], ends: Ends) -> None:
        """Send the programs the signal that the driver has got."""
        if self._signal is None or self._told == self._signal:
            return
        self._told = self._signal
        for number, actor in enumerate(actors):
            if number not in ends.codes and number not in ends.lost:
                actor.stop.remote(int(self._signal))

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """The first signal asks the programs to stop, as `fit` does; the second ends the driver, and Ray the rest."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heed(signum: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = signum

        before = {signum: signal.signal(signum, heed) for signum in STOPPING}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
