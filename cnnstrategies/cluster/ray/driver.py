"""The driver of a run on a Ray cluster: an actor on each node starts ``fit`` as a program, and the driver watches."""

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cnnstrategies.cluster.job import WAIT_SECONDS
from cnnstrategies.cluster.ray import node as node_module
from cnnstrategies.cluster.ray.connection import in_words
from cnnstrategies.cluster.ray.node import Node, RayNode
from cnnstrategies.errors import ConfigurationError

REFUSED = 2  # exit code of a mistake in the configuration, which the next start would find again
LOST = 1  # exit code of a run that has lost a node
FOLLOW = 0.5  # seconds between two looks at the programs; signals and output wait for this time
PATIENCE = 10.0  # seconds in which other nodes may print the reason of their end, after the first failure
# Seconds until Ray knows whether a silent node is lost; by default its five checks may take 65 s.
LOSS = 90.0
STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Ends:
    """Results of the programs after one start of the run.

    Attributes:
        codes: Exit codes by node.
        lost: Nodes whose actor has died or does not answer, in words.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The run's exit code."""
        if self.lost:
            return LOST  # A program that waits in vain for a lost node reports a mistake in the configuration.
        codes = [code if code > 0 else 128 - code for code in self.codes.values() if code]
        return REFUSED if REFUSED in codes else next(iter(codes), 0)

    @property
    def why(self) -> str:
        """The failures in words, beginning with the cause if it is known."""
        then = " then" if self.lost else ""
        failed = [f"node {node}{then} ended with code {code}" for node, code in self.codes.items() if code]
        return "; ".join([*(f"{node} was lost" for node in self.lost), *failed])


@dataclass
class Driver:
    """Runs a program on each node of a cluster, and starts all programs again after a failure.

    Attributes:
        nodes: Number of nodes.
        needed: Resources of each node, by Ray's names.
        script: Script of the shell that starts a node's program.
        probe: Script of the shell that fails if the package is not installed.
        folder: The run folder, with the configuration; the programs' output goes there.
        directory: Working directory of the programs.
        variables: Environment variables of the programs, such as the run's name, by which a restarted program finds its
            last checkpoint.
        foreign: Patterns of environment variables that the programs do not inherit from Ray's own processes.
        max_restarts: How often the run is started again.
        wait: Longest wait for free nodes, in seconds.
        grace: Seconds in which a run that was asked to stop ends.
        goes_on: Whether the run continues after a node's program has ended without an error.
    """

    nodes: int
    needed: dict[str, float]
    script: str
    probe: str
    folder: Path
    directory: str
    variables: dict[str, str]
    foreign: tuple[str, ...]
    max_restarts: int
    wait: float
    grace: float
    goes_on: bool

    def run(self, ray: Any) -> int:
        """Start the run, and start it again after a failure, up to the allowed number of restarts.

        Args:
            ray: The module ``ray``, connected to the cluster.

        Returns:
            The exit code: that of the program that failed, or 128 + the signal's number after a signal.
        """
        self._ray = ray
        self._logs = [self.folder / f"node{number}.log" for number in range(self.nodes)]
        self._printed = [log.stat().st_size if log.exists() else 0 for log in self._logs]  # bytes
        self._signal: int | None = None
        most = self.max_restarts
        with self._heeding_signals():
            for start in itertools.count():
                ends = self._start()
                if self._signal is not None:
                    return 128 + self._signal
                if ends.code in (0, REFUSED):
                    return ends.code
                if start == most:
                    _say(f"The run cannot continue: {ends.why}, and cluster.ray.max_restarts={start}")
                    return ends.code
                _say(f"The run starts again ({start + 1} of at most {most}): {ends.why}")
        raise AssertionError

    def _start(self) -> Ends:
        """Start the run once, and follow it to its end."""
        group = self._place()
        if group is None:
            return Ends()
        actors = [self._actor(group, bundle) for bundle in range(self.nodes)]
        try:
            places = self._look(actors)
            return self._follow(actors, places, self._launch(actors, places))
        except self._ray.exceptions.RayActorError as error:  # An actor has died before it started its program.
            return Ends(lost=[f"a node ({' '.join(str(error).split())[:200]})"])
        finally:
            self._pass_on(ended=True)
            for actor in actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)

    def _place(self) -> Any:
        """Return a placement group with the run's resources on each node; None after a signal.

        Raises:
            ConfigurationError: There were not enough free nodes within the longest wait.
        """
        group = self._ray.util.placement_group([self.needed] * self.nodes, "STRICT_SPREAD")
        wanted = f"{self.nodes} nodes with {in_words(self.needed)}"
        until = time.monotonic() + self.wait
        for attempt in itertools.count():
            if group.wait(1.0):
                return group
            if self._signal is not None or time.monotonic() > until:
                break
            if attempt == 0:
                _say(f"Waiting up to {self.wait:g} s for {wanted}")
        self._ray.util.remove_placement_group(group)
        if self._signal is not None:
            return None
        raise ConfigurationError(
            f"{wanted} each were not free within {self.wait:g} s: see `ray status`, add nodes, lower "
            "trainer.num_nodes, trainer.devices or cluster.cpus_per_task, or raise cluster.ray.wait"
        )

    def _actor(self, group: Any, number: int) -> Any:
        strategies = self._ray.util.scheduling_strategies
        self._ray.cloudpickle.register_pickle_by_value(node_module)
        needed = dict(self.needed)
        memory = needed.pop("memory", None)
        return (
            self._ray.remote(Node)
            .options(
                num_cpus=needed.pop("CPU"),
                num_gpus=needed.pop("GPU", 0),
                memory=memory,
                resources=needed,
                max_concurrency=4,  # One call lasts as long as the program; other calls must still be answered.
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                ),
            )
            .remote(self.foreign)
        )

    def _look(self, actors: list[Any]) -> list[RayNode]:
        references = [actor.look.remote(str(self.folder / "config.yaml"), self.probe) for actor in actors]
        places: list[RayNode] = self._ray.get(references)
        for place in places:
            if place.missing is not None:
                raise ConfigurationError(place.missing)
        return places

    def _launch(self, actors: list[Any], places: list[RayNode]) -> dict[Any, int]:
        """Start the programs. Return the node of each program, by Ray's reference to the program's exit code."""
        main = places[0]
        common = {**self.variables, "MASTER_ADDR": main.address, "MASTER_PORT": str(main.port)}
        _say(f"Starting on {', '.join(f'{place.host} ({place.address})' for place in places)}")
        return {
            actor.run.remote(self.script, self.directory, {**common, "NODE_RANK": str(node)}, str(log)): node
            for node, (actor, log) in enumerate(zip(actors, self._logs, strict=True))
        }

    def _follow(self, actors: list[Any], places: list[RayNode], running: dict[Any, int]) -> Ends:
        """Print the programs' output until all programs have ended.

        After some programs have ended, the other programs must end within a limited time.
        """
        ends, until, asked_to_stop = Ends(), math.inf, False
        while running and not ends.lost and time.monotonic() < until:
            if self._signal is not None and not asked_to_stop:
                asked_to_stop = True
                until = time.monotonic() + self.grace + PATIENCE
                for node in running.values():
                    actors[node].stop.remote(int(self._signal))
            done, _ = self._ray.wait(list(running), num_returns=1, timeout=FOLLOW)
            self._pass_on()
            for reference in done:
                self._note(ends, reference, running.pop(reference), places)
            if done and not asked_to_stop and (ends.code or not self.goes_on):
                until = min(until, time.monotonic() + (PATIENCE if ends.code else WAIT_SECONDS))
        if ends.code and running and not ends.lost and not asked_to_stop:
            # A program may fail because another node is lost, before Ray knows of the loss.
            names = ", ".join(_named(node, places) for node in running.values())
            _say(f"Waiting up to {LOSS:g} s for Ray to report whether it has lost {names}")
            nodes = {actors[node].answer.remote(): node for node in running.values()}
            answered, silent = self._ray.wait(list(nodes), num_returns=len(nodes), timeout=LOSS)
            ends.lost += [_named(nodes[reference], places) for reference in silent]
            for reference in answered:
                self._note(ends, reference, nodes[reference], places)
        return ends

    def _note(self, ends: Ends, reference: Any, node: int, places: list[RayNode]) -> None:
        """Record the result of a call to an actor: an exit code, or the loss of the node."""
        try:
            code = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            ends.lost.append(_named(node, places))
        else:
            if code is not None:
                ends.codes[node] = code

    def _pass_on(self, ended: bool = False) -> None:
        """Print new lines of the programs' output; lines of other nodes than the first begin with their node."""
        for node, log in enumerate(self._logs):
            with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(self._printed[node])
                text = file.read()
                size = len(text) if ended else text.rfind(b"\n") + 1
                self._printed[node] += size
                for line in text[:size].decode(errors="replace").removesuffix("\n").split("\n") if size else ():
                    _say(f"[node {node}] {line}" if node else line)

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Handle signals: the first asks the programs to stop, the second ends the driver, and Ray ends the rest."""
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


def _named(node: int, places: list[RayNode]) -> str:
    return f"node {node} ({places[node].host}, {places[node].address})"


def _say(line: str) -> None:
    print(line, flush=True)
