"""What is to run on Ray, and how it ends."""

from dataclasses import dataclass, field

from cnnstrategies.cluster.ray.node import Place

REFUSED = 2  # Exit code of a mistake in the configuration, which the next start would find again.
LOST = 1


@dataclass(frozen=True)
class Order:
    """What is to run.

    Attributes:
        nodes: How many.
        needed: Of each node, as Ray counts it.
        script: Of the shell; starts a node's program.
        probe: Of the shell; fails where the package is not installed.
        config: The configuration that the program reads.
        name: Of the run, by which a program that is started again finds its last checkpoint.
        directory: Working directory of the program.
        variables: For the program, on every node.
        max_restarts: How often all is started again.
        wait: Seconds to wait for nodes.
        grace: Seconds in which a run that was asked to stop ends.
        goes_on: Whether the run goes on after the first node has ended well.
    """

    nodes: int
    needed: dict[str, float]
    script: str
    probe: str
    config: str
    name: str
    directory: str
    variables: dict[str, str]
    max_restarts: int
    wait: float
    grace: float
    goes_on: bool


@dataclass
class Ends:
    """How the programs of one start have ended.

    Attributes:
        codes: Exit codes by node.
        lost: Nodes whose actor has died.
        silent: Nodes that have not answered since another's program has failed, and of which Ray says nothing.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a node was lost, or a program has failed."""
        return bool(self.lost) or any(self.codes.values())

    @property
    def code(self) -> int:
        """The run's exit code."""
        if self.lost or self.silent:
            return LOST  # A program that waits for such a node in vain says that it was started wrongly.
        codes = [abs(code) if code >= 0 else 128 - code for code in self.codes.values() if code]
        return REFUSED if REFUSED in codes else (codes[0] if codes else 0)

    def why(self, places: list[Place]) -> str:
        """What has failed, in words: first the cause, if it is known."""
        gone = [f"{_named(node, places)} was lost" for node in self.lost]
        gone += [f"{_named(node, places)} does not answer" for node in self.silent]
        then = " then" if gone else ""
        failed = [f"node {node}{then} ended with code {code}" for node, code in self.codes.items() if code]
        return "; ".join(gone + failed)


def _named(node: int, places: list[Place]) -> str:
    return f"node {node} ({places[node].host}, {places[node].address})"
