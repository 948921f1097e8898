"""What a user asks of the parameter server, checked before any process starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.optim import LBFGS, SGD, Optimizer

from cnnstrategies._lightning_private import ends_after_search
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.correction_checks import check_clipping, check_momentum
from cnnstrategies.paramserver.delayed_nesterov import DelayedNesterov
from cnnstrategies.paramserver.security import check_endpoint, is_local
from cnnstrategies.paramserver.slicing import cut, fragments
from cnnstrategies.paramserver.specification import (
    Compression,
    Mode,
    PullCompression,
    Specification,
    hyperparameters,
)
from cnnstrategies.strategies.parameter_server.outer_steps import OuterSteps

Dispatch = Literal["static", "dynamic"]
Security = Literal["auto", "curve", "none"]
OnPartition = Literal["end", "continue"]
OuterMode = Literal["sync", "async"]

AVERAGING = (1.0, 0.0)  # outer_lr and outer_momentum: the outer step ends at the mean of the workers' weights
PARTITION_SECONDS = 3600.0  # for which a link may be cut, where both sides go on
LEAST_SECONDS = 5.0  # for a server that gives signs of life to answer: it may be short of a processor


@dataclass(frozen=True)
class Options:
    """The strategy's arguments; see there.

    Raises:
        ConfigurationError: They contradict each other or are out of range.
    """

    mode: Mode
    staleness: int
    backup_workers: int
    sync_every: int
    fragments: int
    overlap: int
    outer_lr: float
    outer_momentum: float
    outer_mode: OuterMode
    servers: int
    endpoints: Sequence[str]
    coordinator: str | None
    compression: Compression
    compression_ratio: float
    compression_warmup: int
    momentum_correction: bool
    pull_compression: PullCompression
    delay_compensation: float
    replication: int
    snapshot_every: int
    snapshot_directory: str | None
    data_dispatch: Dispatch
    security: Security
    key_file: str | None
    heartbeat: float
    timeout: float
    max_restarts: int
    elastic: int
    on_partition: OnPartition

    def __post_init__(self) -> None:
        # As many servers as copies: how many nodes there are is not known yet.
        servers = len(self.endpoints) or max(self.servers, self.replication)
        workers = max(1, self.backup_workers + 1)  # As few as it takes, for the same reason.
        Specification((), "torch.optim.SGD", (), workers, servers, **self._engine())  # Has its own checks.
        choices = {
            "data_dispatch": Dispatch, "security": Security, "on_partition": OnPartition, "outer_mode": OuterMode
        }  # fmt: skip
        for name, accepted in ((name, get_args(choice)) for name, choice in choices.items()):
            value = getattr(self, name)
            if value not in accepted:
                raise ConfigurationError(f"{name}={value!r}: accepted are {', '.join(accepted)}")
        if self.sync_every < 1:
            raise ConfigurationError(f"sync_every={self.sync_every}: average every 1 step or more; 4 to 16 is usual")
        if self.sync_every > 1 and self.mode != "local":
            raise ConfigurationError(
                f"sync_every={self.sync_every} is for mode: local, not mode: {self.mode}; leave it out"
            )
        self._check_fragments()
        if not 0 < self.outer_lr < math.inf:
            raise ConfigurationError(
                f"outer_lr={self.outer_lr}: use more than 0, and a finite one; 1 with outer_momentum 0 averages"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(f"outer_momentum={self.outer_momentum}: use 0 or more and less than 1")
        if (self.outer_lr, self.outer_momentum) != AVERAGING and self.mode != "local":
            raise ConfigurationError(
                f"outer_lr={self.outer_lr} and outer_momentum={self.outer_momentum} are for mode: local, not mode: "
                f"{self.mode}; leave them out"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts={self.max_restarts} is negative; 0 restarts no process")
        if self.heartbeat <= 0:
            raise ConfigurationError(f"heartbeat={self.heartbeat}: use a number of seconds above 0; 0.5 is usual")
        if self.timeout < 3 * self.heartbeat:
            raise ConfigurationError(
                f"timeout={self.timeout}: a process that misses one heartbeat (every {self.heartbeat} s) is not dead; "
                f"use at least {3 * self.heartbeat:g} s"
            )
        self._check_outer_mode()
        if self.data_dispatch == "dynamic" and self.mode not in ("async", "ssp") and not self.outer_steps_alone:
            raise ConfigurationError(
                f"data_dispatch: dynamic is for mode: async and ssp, and local with outer_mode: async: in mode: "
                f"{self.mode} every worker makes the same number of steps; use data_dispatch: static"
            )
        self._check_elastic()
        for endpoint in self.endpoints:
            if not endpoint.startswith("tcp://") or endpoint.endswith("*"):
                raise ConfigurationError(
                    f"endpoint {endpoint!r}: name where the dedicated server listens as tcp://address:port"
                )
            check_endpoint(endpoint, encrypted=self.security != "none", insecure=self.security == "none")
        if self.endpoints and self.coordinator is None:
            raise ConfigurationError(
                "endpoints: dedicated servers must find the coordinator, which the machine of rank 0 runs: set "
                "coordinator: tcp://address:port"
            )
        if self.endpoints and self.servers > 1:
            raise ConfigurationError(
                f"servers={self.servers} are started on each node, and endpoints names dedicated ones: leave one out"
            )
        if self.key_file is not None and not Path(self.key_file).is_file():
            raise ConfigurationError(
                f"key_file: {self.key_file} does not exist; make it with `cnnstrategies-server --make-keys "
                f"{self.key_file}` and copy it to every machine"
            )

    def _check_fragments(self) -> None:
        for name, value, least in (("fragments", self.fragments, 1), ("overlap", self.overlap, 0)):
            if value < least:
                raise ConfigurationError(f"{name}={value}: use {least} or more")
            if value > least and self.mode != "local":
                raise ConfigurationError(f"{name}={value} is for mode: local, not mode: {self.mode}; leave it out")
        if self.fragments > self.sync_every:
            raise ConfigurationError(
                f"fragments={self.fragments} with sync_every={self.sync_every}: each is exchanged once in sync_every "
                f"steps, one at a time: use at most {self.sync_every}"
            )
        if self.overlap > self.sync_every // self.fragments:
            raise ConfigurationError(
                f"overlap={self.overlap} with sync_every={self.sync_every} and fragments={self.fragments}: an exchange "
                f"must be over before the next begins: use at most {self.sync_every // self.fragments}"
            )
        if self.fragments > 1 and self.pull_compression in ("topk", "onebit"):
            raise ConfigurationError(
                f"fragments={self.fragments} with pull_compression={self.pull_compression!r}: a worker would lack the "
                "changes of steps that it takes no part in: use pull_compression: fp16, or fragments: 1"
            )

        if self.on_partition == "continue" and (self.mode != "local" or self.fragments > 1):
            mode = self.mode if self.fragments == 1 else f"local with fragments={self.fragments}"
            raise ConfigurationError(
                f"on_partition: continue is for mode: local without fragments, not mode: {mode}: the two sides make "
                "different numbers of steps, which only an outer step on all parameters brings together"
            )

    def _check_outer_mode(self) -> None:
        if self.outer_mode == "sync":
            return
        if self.mode != "local":
            raise ConfigurationError(f"outer_mode: async is for mode: local, not mode: {self.mode}; leave it out")
        if self.fragments > 1:
            raise ConfigurationError(
                f"fragments={self.fragments} with outer_mode: async: a worker is sent all values after its own outer "
                "step, and its own steps on the other fragments would be lost; leave fragments out"
            )
        if self.pull_compression in ("topk", "onebit"):
            raise ConfigurationError(
                f"pull_compression={self.pull_compression!r} with outer_mode: async: servers send one change to all "
                "workers, which they have in common outer steps only: use pull_compression: fp16"
            )
        if self.on_partition == "continue":
            raise ConfigurationError(
                "on_partition: continue with outer_mode: async: a worker behind a link that is cut waits for the "
                "servers beyond it; use outer_mode: sync, or on_partition: end"
            )

    def _check_elastic(self) -> None:
        if self.elastic < 0:
            raise ConfigurationError(f"elastic={self.elastic} is negative; 0 lets no worker join")
        if not self.elastic:
            return
        if self.outer_steps_alone:
            raise ConfigurationError(
                f"elastic={self.elastic} with mode: local: who joins has no part in the count of own steps; use mode: "
                "async"
            )
        if self.steps_together:
            mode = self.mode + (" with staleness 0" if self.mode == "ssp" else "")
            raise ConfigurationError(
                f"elastic={self.elastic} is for mode: async, and ssp with a staleness: in mode: {mode} all workers "
                "step together, and none can come and go; use mode: async, or leave elastic out"
            )
        if self.data_dispatch != "dynamic":
            raise ConfigurationError(
                f"elastic={self.elastic} with data_dispatch: {self.data_dispatch}: the shares of an epoch are divided "
                "before anybody joins; use data_dispatch: dynamic"
            )

    def check_momentum(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose momentum the workers are to make and cannot.

        Raises:
            ConfigurationError: `momentum_correction` is not for it.
        """
        if self.momentum_correction:
            kind = type(optimizer)
            check_momentum(f"{kind.__module__}.{kind.__qualname__}", hyperparameters(optimizer))

    def check_clipping(self, limit: float | None) -> None:
        """Refuse clipping where the servers would clip something else than gradients.

        Args:
            limit: The trainer's `gradient_clip_val`.

        Raises:
            ConfigurationError: `momentum_correction` is not for it.
        """
        if self.momentum_correction and self.steps_together:
            check_clipping(limit, self.mode)

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

    def check_workers(self, workers: int) -> None:
        """Refuse backup workers that leave none to wait for.

        Args:
            workers: Of the run.

        Raises:
            ConfigurationError: There are too few workers.
        """
        if self.backup_workers >= workers:
            raise ConfigurationError(
                f"backup_workers={self.backup_workers} of {workers} workers leaves none whose gradient a step waits "
                f"for: use at most {workers - 1}, or more devices"
            )

    @property
    def silence(self) -> float:
        """Seconds for which a process may be silent before it counts as dead, if more than the time-out; else 0."""
        return PARTITION_SECONDS if self.on_partition == "continue" else 0.0

    @property
    def outer_steps_alone(self) -> bool:
        """Whether each worker makes outer steps when it has made its own, without the others."""
        return self.mode == "local" and self.outer_mode == "async"

    @property
    def steps_together(self) -> bool:
        """Whether all workers make the same steps at the same time."""
        if self.mode == "local":
            return not self.outer_steps_alone
        return self.mode == "sync" or (self.mode == "ssp" and not self.staleness)

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
            optimizer = self._outer(module, optimizer, workers)
        whole = Specification.of(module.named_parameters(), optimizer, workers, **options)
        return replace(whole, mode="async") if self.outer_steps_alone else whole

    def outer_steps(self, specification: Specification, made: Sequence[int]) -> OuterSteps | None:
        """When a worker takes part in outer steps; None in the other modes.

        Args:
            specification: Of the run.
            made: What the others have counted, for one that comes later.
        """
        if self.mode != "local":
            return None
        patience = self.timeout if self.on_partition == "continue" else None
        groups = fragments(cut(specification), self.fragments)
        return OuterSteps(self.sync_every, groups, self.overlap, made, patience)

    def _outer(self, module: LightningModule, optimizer: Optimizer, workers: int) -> Optimizer:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in module.parameters() if id(parameter) in held]
        if self.outer_steps_alone:
            return DelayedNesterov(trained, self.outer_lr, self.outer_momentum, workers)
        return SGD(trained, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0)

    def _engine(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "staleness": self.staleness,
            "backup_workers": self.backup_workers,
            "compression": self.compression,
            "compression_ratio": self.compression_ratio,
            "compression_warmup": self.compression_warmup,
            "momentum_correction": self.momentum_correction,
            "pull_compression": self.pull_compression,
            "delay_compensation": self.delay_compensation,
            "replication": self.replication,
            "snapshot_every": self.snapshot_every,
            "snapshot_directory": self.snapshot_directory,
            "elastic": self.elastic,
            "timeout": max(self.timeout, self.silence, LEAST_SECONDS),
        }


def check_module(module: LightningModule) -> None:
    """Refuse a module that the parameter server cannot train.

    Raises:
        ConfigurationError: It optimises by hand.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False: with strategy parameter_server the servers "
            "make the optimizer's step; leave it on, or use strategy ddp"
        )


def check_callbacks(callbacks: Sequence[Callback], options: Options, returns: bool) -> None:
    """Refuse callbacks that search and could not do it right.

    Args:
        callbacks: The trainer's.
        options: The strategy's.
        returns: Whether what a callback finds is where the script goes on.

    Raises:
        ConfigurationError: One of them cannot search here.
    """
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder):
            raise ConfigurationError(
                "BatchSizeFinder: Lightning searches on one device only: do so with strategy: auto, train without it"
            )
        if not isinstance(callback, LearningRateFinder):
            continue
        if options.max_restarts:
            raise ConfigurationError(
                f"LearningRateFinder with max_restarts={options.max_restarts}: a worker that is started again in the "
                "middle of the search has not seen its beginning; search with max_restarts: 0, and train without it"
            )
        if options.backup_workers:
            raise ConfigurationError(
                f"LearningRateFinder with backup_workers={options.backup_workers}: a worker that is late leaves steps "
                "out, and their losses with them; search with backup_workers: 0, and train without it"
            )
        if options.endpoints:
            raise ConfigurationError(
                "LearningRateFinder with endpoints: after the search training needs fresh servers, and dedicated ones "
                "serve one training; search with endpoints left out, and train without it"
            )
        if ends_after_search(callback) and not returns:
            raise ConfigurationError(
                "Tuner.lr_find: what is found stays in the processes that start_method fork or spawn has started; use "
                "start_method: popen, or the callback LearningRateFinder in the fit itself"
            )


def check_optimizers(optimizers: list[Optimizer]) -> Optimizer:
    """Refuse what the servers cannot do.

    Returns:
        The only optimizer.

    Raises:
        ConfigurationError: There is none or more than one, or one that evaluates the loss itself.
    """
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers gave {len(optimizers)} optimizers: the servers run one; use its parameter groups"
        )
    if isinstance(optimizers[0], LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, which servers cannot: use SGD, Adam or another "
            "optimizer that takes one gradient, or strategy ddp"
        )
    return optimizers[0]
