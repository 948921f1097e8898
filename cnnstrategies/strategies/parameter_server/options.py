"""What a user asks of the parameter server, checked before any process starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule
from torch.optim import SGD, Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.security import check_endpoint, is_local
from cnnstrategies.paramserver.specification import Compression, Mode, PullCompression, Specification

Dispatch = Literal["static", "dynamic"]
Security = Literal["auto", "curve", "none"]

PIPELINED_BYTES = 1 << 19  # of a slice, where each is made when its own pushes are there
MOST_HEARTBEAT, BEATS = 0.5, 20  # seconds; signs of life in a time-out
AVERAGING = (1.0, 0.0)  # outer_lr and outer_momentum: the outer step ends at the mean of the workers' weights
LEAST_SECONDS = 5.0  # for a server that gives signs of life to answer: it may be short of a processor


@dataclass(frozen=True)
class Options:
    """The strategy's arguments; see there.

    Raises:
        ConfigurationError: They contradict each other or are out of range.
    """

    mode: Mode
    staleness: int
    sync_every: int
    outer_lr: float
    outer_momentum: float
    servers: int
    endpoints: Sequence[str]
    coordinator: str | None
    compression: Compression
    compression_ratio: float
    pull_compression: PullCompression
    replication: int
    data_dispatch: Dispatch
    security: Security
    key_file: str | None
    timeout: float
    max_restarts: int
    elastic: int
    combine: bool

    def __post_init__(self) -> None:
        # As many servers as copies: how many nodes there are is not known yet.
        servers = len(self.endpoints) or max(self.servers, self.replication)
        Specification((), "torch.optim.SGD", (), 1, servers, **self._engine())  # Has its own checks.
        choices = {"data_dispatch": Dispatch, "security": Security}
        for name, accepted in ((name, get_args(choice)) for name, choice in choices.items()):
            value = getattr(self, name)
            if value not in accepted:
                raise ConfigurationError(f"{name}={value!r}: accepted are {', '.join(accepted)}")
        check_together(self)

    def check_nodes(self, nodes: int) -> None:
        """Refuse more copies than there are servers.

        Args:
            nodes: Of the run.

        Raises:
            ConfigurationError: There are too few servers.
        """
        if self.replication > self.server_count(nodes):
            raise ConfigurationError(
                f"replication={self.replication} needs as many servers, but servers={self.servers} are started on "
                f"each node, and num_nodes={nodes}: change one of them"
            )

    @property
    def heartbeat(self) -> float:
        """Seconds between two signs of life of a process."""
        return min(MOST_HEARTBEAT, self.timeout / BEATS)

    @property
    def steps_together(self) -> bool:
        """Whether all workers make the same steps at the same time."""
        return self.mode in ("sync", "local") or (self.mode == "ssp" and not self.staleness)

    @property
    def waits_for_pushes(self) -> bool:
        """Whether each worker waits for the gradients of all others, or for those of some steps before."""
        return self.mode == "ssp" or self.steps_together

    @property
    def comes_midway(self) -> bool:
        """Whether a worker that was started again may begin in the middle of an epoch: it finds batches there."""
        return self.data_dispatch == "dynamic" and not self.steps_together

    def combines(self, per_node: int) -> bool:
        """Whether the workers of a node push as one.

        Args:
            per_node: How many there are on each.
        """
        return self.combine and per_node > 1

    def server_count(self, nodes: int) -> int:
        """Number of servers of a run."""
        return len(self.endpoints) or self.servers * nodes

    def encrypted(self, coordinator: str) -> bool:
        """Whether a run whose coordinator listens there uses CURVE.

        Raises:
            ConfigurationError: It must, and there is no key file that every machine has.
        """
        ipc = coordinator.startswith("ipc://")  # In a directory that only this user can enter.
        local = is_local(coordinator) and all(is_local(endpoint) for endpoint in self.endpoints)
        wanted = self.security == "curve" or (self.security == "auto" and not ipc)
        if wanted and self.key_file is None and not local:
            raise ConfigurationError(
                f"the coordinator listens at {coordinator}, and its connections are encrypted: make a key file with "
                "`cnnstrategies-server --make-keys FILE`, copy it to every machine and set key_file; on a network of "
                "your own, security: none"
            )
        return wanted

    def specification(
        self, module: LightningModule, optimizer: Optimizer, nodes: int, workers: int, **changes: Any
    ) -> Specification:
        """The engine's specification for a module and its optimizer; mode ``local`` has the outer one in its place."""
        options = {"servers": self.server_count(nodes), **self._engine(), **changes}
        if self.mode == "local":
            optimizer = self._outer(module, optimizer)
        if self._may_pipeline and "clip_norm" not in changes:
            options = {"pipelined": True, "slice_bytes": PIPELINED_BYTES, **options}
        pushing = nodes if self.combines(workers // nodes) else workers
        return Specification.of(module.named_parameters(), optimizer, pushing, **options)

    @property
    def _may_pipeline(self) -> bool:
        """Whether values come back while gradients leave: with dedicated servers, else both share the nodes' links."""
        return bool(self.endpoints) and self.mode == "sync" and self.pull_compression in ("none", "fp16", "bf16")

    def _outer(self, module: LightningModule, optimizer: Optimizer) -> Optimizer:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in module.parameters() if id(parameter) in held]
        return SGD(trained, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0)

    def _engine(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "staleness": self.staleness,
            "compression": self.compression,
            "compression_ratio": self.compression_ratio,
            "pull_compression": self.pull_compression,
            "replication": self.replication,
            "elastic": self.elastic,
            "timeout": max(self.timeout, LEAST_SECONDS),
        }


def check_together(options: Options) -> None:
    """Refuse what is out of range, or contradicts the rest.

    Raises:
        ConfigurationError: So it is, and why.
    """
    _check_own_steps(options)
    _check_outer_step(options)
    _check_times(options)
    _check_dispatch(options)
    _check_elastic(options)
    _check_combining(options)
    _check_places(options)


def _check_own_steps(options: Options) -> None:
    if options.sync_every < 1:
        raise ConfigurationError(f"sync_every={options.sync_every}: average every 1 step or more; 4 to 16 is usual")
    if options.sync_every > 1 and options.mode != "local":
        raise ConfigurationError(
            f"sync_every={options.sync_every} is for mode: local, not mode: {options.mode}; leave it out"
        )


def _check_outer_step(options: Options) -> None:
    if not 0 < options.outer_lr < math.inf:
        raise ConfigurationError(
            f"outer_lr={options.outer_lr}: use more than 0, and a finite one; 1 with outer_momentum 0 averages"
        )
    if not 0 <= options.outer_momentum < 1:
        raise ConfigurationError(f"outer_momentum={options.outer_momentum}: use 0 or more and less than 1")
    if (options.outer_lr, options.outer_momentum) != AVERAGING and options.mode != "local":
        raise ConfigurationError(
            f"outer_lr={options.outer_lr} and outer_momentum={options.outer_momentum} are for mode: local, not mode: "
            f"{options.mode}; leave them out"
        )


def _check_times(options: Options) -> None:
    if options.max_restarts < 0:
        raise ConfigurationError(f"max_restarts={options.max_restarts} is negative; 0 restarts no process")
    if not 0 < options.timeout < math.inf:
        raise ConfigurationError(f"timeout={options.timeout}: use a number of seconds above 0; 10 is usual")


def _check_dispatch(options: Options) -> None:
    if options.data_dispatch == "dynamic" and options.mode not in ("async", "ssp"):
        raise ConfigurationError(
            f"data_dispatch: dynamic is for mode: async and ssp: in mode: {options.mode} every worker makes the same "
            "number of steps; use data_dispatch: static"
        )


def _check_elastic(options: Options) -> None:
    if options.elastic < 0:
        raise ConfigurationError(f"elastic={options.elastic} is negative; 0 lets no worker join")
    if not options.elastic:
        return
    if options.steps_together:
        mode = options.mode + (" with staleness 0" if options.mode == "ssp" else "")
        raise ConfigurationError(
            f"elastic={options.elastic} is for mode: async, and ssp with a staleness: in mode: {mode} all workers step "
            "together, and none can come and go; use one of these, or leave it out"
        )
    if options.data_dispatch != "dynamic":
        raise ConfigurationError(
            f"elastic={options.elastic} with data_dispatch: {options.data_dispatch}: the shares of an epoch are "
            "divided before anybody joins; use data_dispatch: dynamic"
        )


def _check_combining(options: Options) -> None:
    if not options.combine:
        return
    if options.mode != "sync":
        raise ConfigurationError(
            f"combine: true is for mode: sync, not mode: {options.mode}: in others the workers of a node make steps of "
            "their own, or send seldom; leave it out"
        )
    if options.max_restarts:
        raise ConfigurationError(
            f"combine: true with max_restarts={options.max_restarts}: who comes back has no node; use one of the two"
        )


def _check_places(options: Options) -> None:
    for endpoint in options.endpoints:
        if not endpoint.startswith("tcp://") or endpoint.endswith("*"):
            raise ConfigurationError(
                f"endpoint {endpoint!r}: name where the dedicated server listens as tcp://address:port"
            )
        check_endpoint(endpoint, encrypted=options.security != "none", insecure=options.security == "none")
        is_local(endpoint)  # Raises if nothing can listen there.
    if options.coordinator is not None:
        is_local(options.coordinator)
    if options.endpoints and options.coordinator is None:
        raise ConfigurationError(
            "endpoints: dedicated servers must find the coordinator, which the machine of rank 0 runs: set "
            "coordinator: tcp://address:port"
        )
    if options.endpoints and options.servers > 1:
        raise ConfigurationError(
            f"servers={options.servers} are started on each node, and endpoints names dedicated ones: leave one out"
        )
    if options.key_file is not None and not Path(options.key_file).is_file():
        raise ConfigurationError(
            f"key_file: {options.key_file} does not exist; make it with `cnnstrategies-server --make-keys "
            f"{options.key_file}` and copy it to every machine"
        )
