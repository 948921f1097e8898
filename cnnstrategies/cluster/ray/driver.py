"""The driver of a run on a Ray cluster: an actor on each node starts ``fit`` as a program, and it watches them."""

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

REFUSED = 2  # Exit code of a mistake in the configuration, which the next start would find again.
LOST = 1
FOLLOW = 0.5  # Seconds; also how long a signal and what is printed wait for the driver.
PATIENCE = 10.0  # Seconds in which the other nodes may say why they end too, after the first that failed.
# Seconds until Ray has said whether a node that does not answer is lost: its five checks may take 65 by default.
LOSS = 90.0
STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Ends:
    """How the programs of one start have ended.

    Attributes:
        codes: Exit codes by node.
        lost: Nodes whose actor has died, or does not answer, in words.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The run's exit code."""
        if self.lost:
            return LOST  # A program that waits for such a node in vain says that it was started wrongly.
        codes = [code if code > 0 else 128 - code for code in self.codes.values() if code]
        return REFUSED if REFUSED in codes else next(iter(codes), 0)

    @property
    def why(self) -> str:
        """What has failed, in words: first the cause, if it is known."""
        then = " then" if self.lost else ""
        failed = [f"node {node}{then} ended with code {code}" for node, code in self.codes.items() if code]
        return "; ".join([*(f"{node} was lost" for node in self.lost), *failed])


@dataclass
class Driver:
    """Runs a program on each node of a cluster.

    Attributes:
        needed: Of each node, as Ray counts it.
        script: Of the shell; starts a node's program.
        probe: Of the shell; fails where the package is not installed.
        folder: Of the run, with its configuration; what the programs print goes there. Its name is the run's, by which
            a program that is started again finds its last checkpoint.
        grace: Seconds in which a run that was asked to stop ends.
        goes_on: Whether the run goes on after a node has ended well.
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
        """Start the run, and start it again when it is lost.

        Args:
            ray: Connected to the cluster.

        Returns:
            The exit code: that of the program that failed, or 128 and the signal's number after a signal.
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
                    _say(f"The run cannot go on: {ends.why}, and cluster.ray.max_restarts={start}")
                    return ends.code
                _say(f"The run starts again ({start + 1} of at most {most}): {ends.why}")
        raise AssertionError

    def _start(self) -> Ends:
        """One start of the run, until its end."""
        group = self._place()
        if group is None:
            return Ends()
        actors = [self._actor(group, bundle) for bundle in range(self.nodes)]
        try:
            places = self._look(actors)
            return self._follow(actors, places, self._launch(actors, places))
        except self._ray.exceptions.RayActorError as error:  # Before its program was started.
            return Ends(lost=[f"a node ({' '.join(str(error).split())[:200]})"])
        finally:
            self._pass_on(ended=True)
            for actor in actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)

    def _place(self) -> Any:
        """Nodes of the cluster, each with what the run needs of it; None after a signal."""
        group = self._ray.util.placement_group([self.needed] * self.nodes, "STRICT_SPREAD")
        wanted = f"{self.nodes} nodes with {in_words(self.needed)}"
        until = time.monotonic() + self.wait
        for tried in itertools.count():
            if group.wait(1.0):
                return group
            if self._signal is not None or time.monotonic() > until:
                break
            if not tried:
                _say(f"Waiting up to {self.wait:g} s for {wanted}")
        self._ray.util.remove_placement_group(group)
        if self._signal is not None:
            return None
        raise ConfigurationError(
            f"{wanted} each were not free for {self.wait:g} s: see `ray status`, add nodes, lower trainer.num_nodes, "
            "trainer.devices or cluster.cpus_per_task, or raise cluster.ray.wait"
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
                max_concurrency=4,  # Its program runs in one of the calls.
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                ),
            )
            .remote(self.foreign)
        )

    def _look(self, actors: list[Any]) -> list[RayNode]:
        asked = [actor.look.remote(str(self.folder / "config.yaml"), self.probe) for actor in actors]
        places: list[RayNode] = self._ray.get(asked)
        for place in places:
            if place.missing is not None:
                raise ConfigurationError(place.missing)
        return places

    def _launch(self, actors: list[Any], places: list[RayNode]) -> dict[Any, int]:
        """Start the programs: their nodes, by what has their exit codes."""
        main = places[0]
        meeting = {"MASTER_ADDR": main.address, "MASTER_PORT": str(main.port)}
        common = {**self.variables, **meeting}
        _say(f"Starting on {', '.join(f'{place.host} ({place.address})' for place in places)}")
        return {
            actor.run.remote(self.script, self.directory, {**common, "NODE_RANK": str(node)}, str(log)): node
            for node, (actor, log) in enumerate(zip(actors, self._logs, strict=True))
        }

    def _follow(self, actors: list[Any], places: list[RayNode], running: dict[Any, int]) -> Ends:
        """Pass on what the programs print until all have ended, or some have and the others do not."""
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
            # A program may fail because a node with others is lost, before Ray knows of that.
            names = ", ".join(_named(node, places) for node in running.values())
            _say(f"Waiting up to {LOSS:g} s for Ray to say whether it has lost {names}")
            asked = {actors[node].answer.remote(): node for node in running.values()}
            known, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=LOSS)
            ends.lost += [_named(asked[reference], places) for reference in silent]
            for reference in known:
                self._note(ends, reference, asked[reference], places)
        return ends

    def _note(self, ends: Ends, reference: Any, node: int, places: list[RayNode]) -> None:
        """Note how a call to an actor has ended."""
        try:
            code = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            ends.lost.append(_named(node, places))
        else:
            if code is not None:
                ends.codes[node] = code

    def _pass_on(self, ended: bool = False) -> None:
        """Print the lines that the programs have printed, those of other nodes than the first with their node."""
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


def _named(node: int, places: list[RayNode]) -> str:
    return f"node {node} ({places[node].host}, {places[node].address})"


def _say(line: str) -> None:
    print(line, flush=True)
