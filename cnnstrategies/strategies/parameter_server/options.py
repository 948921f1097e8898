"""What a user asks of the parameter server, checked before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule
from torch.optim import SGD, Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.security import is_local
from cnnstrategies.paramserver.specification import (
    Compression,
    Mode,
    PullCompression,
    Specification,
)
from cnnstrategies.strategies.parameter_server.option_checks import check_together

Dispatch = Literal["static", "dynamic"]
Security = Literal["auto", "curve", "none"]

PIPELINED_BYTES = 1 << 19  # of a slice, where each is made when its own pushes are there
MOST_HEARTBEAT, BEATS = 0.5, 20  # seconds; signs of life in a time-out
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
    snapshot_every: int
    snapshot_directory: str | None
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
            "snapshot_every": self.snapshot_every,
            "snapshot_directory": self.snapshot_directory,
            "elastic": self.elastic,
            "timeout": max(self.timeout, LEAST_SECONDS),
        }
