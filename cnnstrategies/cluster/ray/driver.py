"""Driver of a run on a Ray cluster. It starts an actor on each node, and the actor runs ``fit`` as a program."""

import contextlib
import itertools
import math
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.job import WAIT_SECONDS
from cnnstrategies.cluster.ray import node as node_module
from cnnstrategies.cluster.ray.connection import in_words
from cnnstrategies.cluster.ray.node import Node, RayNode
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import LAUNCH
from cnnstrategies.runtime.stop_signals import STOPPING, Repeated, acting_on, end_process

REFUSED = 2  # Exit code for a mistake in the configuration. The run is not restarted, because it would fail again.
LOST = 1  # Exit code of a run that has lost a node.
FOLLOW = 0.5  # Seconds between two checks of the programs, their output and received signals.
PATIENCE = 10.0  # Seconds for which the driver waits for the other programs to end after the first program has failed.
# Seconds to wait until Ray has detected the loss of a node. By default Ray makes five checks, which may take 65 s.
LOSS = 90.0


@dataclass
class Ends:
    """Results of the programs on all nodes after one start of the run.

    Attributes:
        codes: Exit code of each program that has ended; keys are the numbers of the programs' nodes.
        lost: Descriptions of the nodes whose actors have died or do not answer.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The run's exit code."""
        if self.lost:
            return LOST  # Other codes are ignored: programs that wait for the lost node in vain may end with REFUSED.
        codes = [code if code > 0 else 128 - code for code in self.codes.values() if code]
        return REFUSED if REFUSED in codes else next(iter(codes), 0)

    @property
    def why(self) -> str:
        """Text for the user about all failures. Lost nodes come first, because they cause the other failures."""
        then = " then" if self.lost else ""
        failed = [f"node {node}{then} ended with code {code}" for node, code in self.codes.items() if code]
        return "; ".join([*(f"{node} was lost" for node in self.lost), *failed])


@dataclass
class Driver:
    """Driver that runs a program on each node of a Ray cluster and, after a failure, restarts all programs.

    Attributes:
        nodes: Number of nodes.
        needed: Resources to request on each node, by the names that Ray uses for resources.
        script: Shell script that runs a node's program.
        probe: Shell script that fails if the package is not installed on a node.
        folder: The run folder. The programs' output is written to it.
        configuration: Path of the run's configuration, which every node must see.
        directory: Working directory of the programs, on every node that has this directory.
        variables: Environment variables for the programs. One of the variables has the run's name, which a restarted
            program needs to find the last checkpoint.
        foreign: Patterns for names of environment variables that the programs must not inherit from Ray's processes.
        max_restarts: Largest number of restarts.
        wait: Longest time to wait for free nodes, in seconds.
        grace: Time that the programs have to stop after a signal, in seconds.
        goes_on: Whether the run can continue when one of its programs has ended without an error.
    """

    nodes: int
    needed: dict[str, float]
    script: str
    probe: str
    folder: Path
    configuration: str
    directory: str
    variables: dict[str, str]
    foreign: tuple[str, ...]
    max_restarts: int
    wait: float
    grace: float
    goes_on: bool

    def run(self, ray: Any) -> int:
        """Run the programs, and restart all of them after a failure, up to the allowed number of restarts.

        Args:
            ray: The module ``ray``, connected to the cluster.

        Returns:
            The exit code of the run: 0, the exit code of the program that failed, or 128 + the signal's number.
        """
        self._ray = ray
        self._logs = [self.folder / f"node{number}.log" for number in range(self.nodes)]
        # For each log, the number of bytes at the beginning that must not be printed again: output of an earlier run,
        # and output that the driver has already printed.
        self._printed = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        self._signal: int | None = None
        self._repeated = Repeated()
        most = self.max_restarts
        with acting_on(STOPPING, self._note_signal):
            for start in itertools.count():
                ends = self._start()
                if self._signal is not None:
                    return 128 + self._signal
                if ends.code in (0, REFUSED):
                    return ends.code
                if start == most:
                    used = f"no restart is left (cluster.ray.max_restarts={start})"
                    _say(f"The run cannot continue: {ends.why}, and {used}")
                    return ends.code
                _say(f"The run restarts (restart {start + 1} of at most {most}), because {ends.why}")
        raise AssertionError

    def _start(self) -> Ends:
        """Run the programs once on all nodes until they have ended, and return their results."""
        group = self._place()
        if group is None:
            return Ends()
        actors = [self._actor(group, bundle) for bundle in range(self.nodes)]
        try:
            places = self._look(actors)
            return self._follow(actors, places, self._launch(actors, places))
        except self._ray.exceptions.RayActorError as error:  # An actor has died before its program was started.
            return Ends(lost=[f"a node ({' '.join(str(error).split())[:200]})"])
        finally:
            self._pass_on(ended=True)
            for actor in actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)

    def _place(self) -> Any:
        """Wait for free nodes, and return a placement group with the requested resources.

        The result is None if the driver has received a signal while it was waiting.

        Raises:
            ConfigurationError: There were not enough free nodes within ``wait`` seconds.
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
            f"{wanted} each were not free within {self.wait:g} s: check `ray status`, add nodes, lower "
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
                max_concurrency=4,  # Other methods must be callable while `run` waits for the program.
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                ),
            )
            .remote(self.foreign)
        )

    def _look(self, actors: list[Any]) -> list[RayNode]:
        references = [actor.look.remote(self.configuration, self.probe) for actor in actors]
        places: list[RayNode] = self._ray.get(references)
        for place in places:
            if place.missing is not None:
                raise ConfigurationError(place.missing)
        return places

    def _launch(self, actors: list[Any], places: list[RayNode]) -> dict[Any, int]:
        """Start the programs on all nodes.

        Returns:
            The numbers of the programs' nodes. The keys are Ray's references to the future exit codes of the programs.
        """
        main = places[0]
        common = {**self.variables, "MASTER_ADDR": main.address, "MASTER_PORT": str(main.port)}
        # A program that is left over from an earlier start does not know this secret, so that the ranks refuse it.
        common[LAUNCH] = f"{secrets.token_hex(16)} Ray start {secrets.token_hex(4)}"
        _say(f"Starting on {', '.join(f'{place.host} ({place.address})' for place in places)}")
        return {
            actor.run.remote(self.script, self.directory, {**common, "NODE_RANK": str(node)}, str(log)): node
            for node, (actor, log) in enumerate(zip(actors, self._logs, strict=True))
        }

    def _follow(self, actors: list[Any], places: list[RayNode], running: dict[Any, int]) -> Ends:
        """Print the programs' output until all programs have ended, and return their results.

        When a program has failed, the other programs must end within a limited time. The same applies when a program
        has ended without an error, unless the run can continue without this program.
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
            # The program may have failed because another node was lost, which Ray has not detected yet.
            names = ", ".join(_named(node, places) for node in running.values())
            _say(f"Waiting up to {LOSS:g} s for Ray to report whether it has lost {names}")
            nodes = {actors[node].answer.remote(): node for node in running.values()}
            answered, silent = self._ray.wait(list(nodes), num_returns=len(nodes), timeout=LOSS)
            ends.lost += [_named(nodes[reference], places) for reference in silent]
            for reference in answered:
                self._note(ends, reference, nodes[reference], places)
        return ends

    def _note(self, ends: Ends, reference: Any, node: int, places: list[RayNode]) -> None:
        """Record the result of an actor's method: the exit code of the node's program, or the loss of the node.

        Nothing is recorded if the actor is alive and the method has returned None.
        """
        try:
            code = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            ends.lost.append(_named(node, places))
        else:
            if code is not None:
                ends.codes[node] = code

    def _pass_on(self, ended: bool = False) -> None:
        """Print new lines of the programs' output. Lines from nodes other than node 0 begin with the node's number.

        Args:
            ended: Whether the programs have ended. If so, an incomplete last line is also printed.
        """
        for node, log in enumerate(self._logs):
            with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(self._printed[node])
                text = file.read()
                size = len(text) if ended else text.rfind(b"\n") + 1
                self._printed[node] += size
                for line in text[:size].decode(errors="replace").removesuffix("\n").split("\n") if size else ():
                    _say(f"[node {node}] {line}" if node else line)

    def _note_signal(self, signum: int) -> None:
        """Note that the programs must stop. After a second signal, end the driver at once, and Ray ends the actors."""
        if self._repeated.note(signum):
            end_process(signum)
        self._signal = signum


def _named(node: int, places: list[RayNode]) -> str:
    return f"node {node} ({places[node].host}, {places[node].address})"


def _say(line: str) -> None:
    print(line, flush=True)
