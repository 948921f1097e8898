"""Options of the strategy ``parameter_server``: their checks, their defaults, and texts for the start panel."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD, Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import AUTO, may_be_lossy, payload_compression
from cnnstrategies.paramserver.security import check_endpoint, is_local
from cnnstrategies.paramserver.specification import (
    Mode,
    RunOptions,
    Specification,
    too_small,
    unknown_choices,
)
from cnnstrategies.strategies.differences import differences_of_replicas

Dispatch = Literal["static", "dynamic"]
Security = Literal["auto", "curve", "none"]

# Size of a slice in bytes in a pipelined run. In such a run, a server updates each slice as soon as all gradients of
# the slice have arrived.
PIPELINED_BYTES = 1 << 19
MOST_HEARTBEAT = 0.5  # Largest time between two heartbeats of a process, in seconds.
BEATS = 20  # Smallest number of heartbeats that a process sends within a time-out.
AVERAGING = (1.0, 0.0)  # With these values of outer_lr and outer_momentum, an outer step averages the workers' weights.
USUAL_STALENESS = 4  # Default of staleness in mode ssp.
USUAL_SYNC_EVERY = 8  # Default of sync_every in mode local.
# Smallest time-out in seconds for the reply of a server. A server may reply late because it gets little CPU time,
# although its heartbeats arrive.
LEAST_SECONDS = 5.0


def usual_staleness(mode: Mode) -> int:
    """Return the default of ``staleness`` for a mode. The default is 0 for all modes except ``ssp``."""
    return USUAL_STALENESS if mode == "ssp" else 0


def usual_sync_every(mode: Mode) -> int:
    """Return the default of ``sync_every`` for a mode. The default is 1 for all modes except ``local``."""
    return USUAL_SYNC_EVERY if mode == "local" else 1


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions(RunOptions):
    """All options of the strategy ``parameter_server``, which :class:`.ParameterServerStrategy` describes.

    The base class has the options that become part of the run's specification.
    """

    sync_every: int
    outer_lr: float
    outer_momentum: float
    servers_per_node: int
    endpoints: Sequence[str]
    coordinator: str | None
    data_dispatch: Dispatch
    security: Security
    key_file: str | None
    max_restarts: int
    combine_per_node: bool
    shares: Literal["auto", "equal"] | Sequence[float]

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        yield from unknown_choices(self, {"data_dispatch": Dispatch, "security": Security})
        yield from too_small(self, {"sync_every": 1, "servers_per_node": 1, "max_restarts": 0})
        yield from self._mistakes_of_modes()
        yield from self._mistakes_of_places()

    def _mistakes_of_modes(self) -> Iterator[str]:
        """Yield an error message for each option that contradicts the mode or another option."""
        if self.sync_every > 1 and self.mode != "local":
            yield f"sync_every={self.sync_every} is for `mode: local`, not `mode: {self.mode}`; leave sync_every out"
        if not 0 < self.outer_lr < math.inf:
            yield (
                f"outer_lr={self.outer_lr}: use a finite value above 0; outer_lr 1 with outer_momentum 0 averages the "
                "workers' weights"
            )
        if not 0 <= self.outer_momentum < 1:
            yield f"outer_momentum={self.outer_momentum}: use 0 or more and less than 1"
        if (self.outer_lr, self.outer_momentum) != AVERAGING and self.mode != "local":
            yield (
                f"outer_lr={self.outer_lr} and outer_momentum={self.outer_momentum} are for `mode: local`, not `mode: "
                f"{self.mode}`; leave both options out"
            )
        if self.data_dispatch == "dynamic" and self.mode not in ("async", "ssp"):
            yield (
                f"`data_dispatch: dynamic` is for the modes async and ssp, because in mode {self.mode} every worker "
                "makes the same number of steps; use `data_dispatch: static`"
            )
        if self.shares != "equal" and self.mode != "sync":
            yield (
                f"shares={self.shares} are for `mode: sync`, not `mode: {self.mode}`, in which workers make separate "
                "steps; leave shares out, or use `mode: async` and `data_dispatch: dynamic`, so that faster workers "
                "take more batches"
            )
        if self.max_joiners and self.aggregates:
            mode = self.mode + (" with staleness 0" if self.mode == "ssp" else "")
            yield (
                f"max_joiners={self.max_joiners} is for mode async, and for mode ssp with a staleness above 0. In mode "
                f"{mode} all workers step together, so no worker can join or leave; use `mode: async`, or leave "
                "max_joiners out"
            )
        if self.max_joiners and self.data_dispatch != "dynamic":
            yield (
                f"max_joiners={self.max_joiners} cannot be used with `data_dispatch: {self.data_dispatch}`, which "
                "divides the batches of an epoch before the epoch begins, so a joiner would get none; use "
                "`data_dispatch: dynamic`"
            )
        if self.combine_per_node and self.mode != "sync":
            yield (
                f"`combine_per_node: true` is for `mode: sync`, not `mode: {self.mode}`: in all modes except sync the "
                "workers of a node make separate steps, or push rarely; leave combine_per_node out"
            )
        if self.combine_per_node and self.max_restarts:
            yield (
                f"`combine_per_node: true` cannot be used with max_restarts={self.max_restarts}, because a restarted "
                "worker cannot share the node's memory; set only one of the two options"
            )

    def _mistakes_of_places(self) -> Iterator[str]:
        """Yield an error message for each mistake in the addresses, the number of servers or the key file."""
        for endpoint in self.endpoints:
            if not endpoint.startswith("tcp://") or endpoint.endswith("*"):
                yield f"endpoints: write the address of a dedicated server as tcp://address:port, not {endpoint!r}"
            check_endpoint(endpoint, encrypted=self.security != "none", insecure=self.security == "none")
            is_local(endpoint)  # Raises an error if the address is not valid.
        if self.coordinator is not None:
            is_local(self.coordinator)
        if self.endpoints and self.coordinator is None:
            yield (
                "endpoints: dedicated servers need the address of the coordinator, which runs on the machine of rank "
                "0: set `coordinator: tcp://address:port`"
            )
        if self.endpoints and self.servers_per_node > 1:
            yield (
                f"servers_per_node={self.servers_per_node} starts servers on each node, but endpoints names dedicated "
                "servers: leave one of the two options out"
            )
        if self.endpoints and self.replication > len(self.endpoints):
            yield (
                f"replication={self.replication} needs at least {self.replication} servers, but endpoints names "
                f"{len(self.endpoints)}: start more servers, or lower replication"
            )
        if self.key_file is not None and not Path(self.key_file).is_file():
            yield (
                f"key_file: the file {self.key_file} does not exist; make it with `cnnstrategies-server --make-keys "
                f"{self.key_file}` and copy it to every machine"
            )

    def check_nodes(self, nodes: int) -> None:
        """Raise a ConfigurationError if ``replication`` is larger than the number of servers on `nodes` nodes."""
        if self.replication > self.server_count(nodes):
            raise ConfigurationError(
                f"replication={self.replication} needs at least {self.replication} servers, but servers_per_node="
                f"{self.servers_per_node} and num_nodes={nodes} give {self.server_count(nodes)}: change one of them"
            )

    @property
    def heartbeat(self) -> float:
        """Time between two heartbeats of a process, in seconds."""
        return min(MOST_HEARTBEAT, self.timeout / BEATS)

    @property
    def waits_for_pushes(self) -> bool:
        """Whether a worker that is too many steps ahead waits for the other workers' pushes.

        This is True for all modes except ``async``.
        """
        return self.mode == "ssp" or self.aggregates

    def combines(self, per_node: int) -> bool:
        """Return whether the workers of a node combine their gradients.

        The result is False if a node has only one worker.

        Args:
            per_node: Number of workers of a node.
        """
        return self.combine_per_node and per_node > 1

    def server_count(self, nodes: int) -> int:
        """Return the number of servers of a run on `nodes` nodes."""
        return len(self.endpoints) or self.servers_per_node * nodes

    def encrypted(self, coordinator: str) -> bool:
        """Return whether the connections of a run are encrypted with CURVE.

        Args:
            coordinator: Address at which the coordinator listens.

        Raises:
            ConfigurationError: Connections to other machines are encrypted, and ``key_file`` is not set.
        """
        # A run with a socket file is not encrypted by default, because only this user can enter the file's directory.
        ipc = coordinator.startswith("ipc://")
        local = is_local(coordinator) and all(is_local(endpoint) for endpoint in self.endpoints)
        wanted = self.security == "curve" or (self.security == "auto" and not ipc)
        if wanted and self.key_file is None and not local:
            raise ConfigurationError(
                f"the coordinator listens at {coordinator}, and connections to it are encrypted: make a key file with "
                "`cnnstrategies-server --make-keys FILE`, copy it to every machine and set key_file; on a private "
                "network you may set `security: none` instead"
            )
        return wanted

    def specification(
        self, module: LightningModule, optimizer: Optimizer, nodes: int, workers: int, **changes: Any
    ) -> Specification:
        """Return the run's specification: the settings on which all workers and servers agree.

        Args:
            module: The module that is trained.
            optimizer: The module's optimizer. In mode ``local`` the specification describes the outer optimizer
                instead.
            nodes: Number of nodes.
            workers: Number of workers over all nodes.
            **changes: Values of fields of the specification. They replace the values from the options.
        """
        options = {field.name: getattr(self, field.name) for field in fields(RunOptions)}
        options |= {"servers": self.server_count(nodes), "timeout": max(self.timeout, LEAST_SECONDS), **changes}
        if self.mode == "local":
            optimizer = self._outer(module, optimizer)
        # Pipelining is used only with dedicated servers. If servers ran on the workers' nodes, pulled values and pushed
        # gradients would compete for the nodes' links.
        dedicated = bool(self.endpoints) and self.mode == "sync" and not may_be_lossy(self.pull_compression)
        unpipelined = "clip_norm" in changes or changes.get("clips_each_step") or changes.get("is_joint")
        if dedicated and not unpipelined:
            options = {"pipelined": True, "slice_bytes": PIPELINED_BYTES, **options}
        together = workers // nodes if self.combines(workers // nodes) else 1
        options["per_node"] = together
        return Specification.of(module.named_parameters(), optimizer, workers // together, **options)

    def _outer(self, module: LightningModule, optimizer: Optimizer) -> Optimizer:
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for parameter in module.parameters() if id(parameter) in optimized]
        return SGD(trained, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0)

    # Texts for the start panel

    def describe(self, nodes: int, joint: str = "") -> list[tuple[str, str]]:
        """Return the start panel's rows about the mode and the servers, as pairs of a name and a text.

        Args:
            nodes: Number of nodes.
            joint: Name of the optimizer, if it makes the steps of all parameters together; otherwise empty.
        """
        if self.endpoints:
            places = "dedicated"
        else:
            places = f"{self.servers_per_node} on each of {nodes} nodes" if nodes > 1 else "on this node"
        text = f"{self.server_count(nodes)} ({places})"
        if joint:
            text += f"; server 0 holds all parameters, because {joint} makes the steps of all parameters together"
        if self.replication > 1:
            text += f"; each slice of the parameters is on {self.replication} servers"
        mode = self.mode + (f", staleness {self.staleness}" if self.mode == "ssp" else "")
        if self.combine_per_node:
            mode += ", one push for each node"
        return [("mode", mode), ("servers", text)]

    def differences(
        self,
        module: nn.Module,
        workers: int,
        batch_size: int | None,
        accumulated: int = 1,
        sees_gradients: Sequence[str] = (),
    ) -> list[str]:
        """Return one line of text for each difference from a run on one device.

        Args:
            module: The module that is trained.
            workers: Number of workers.
            batch_size: Number of samples in a batch of one worker; None if the number is not known.
            accumulated: Number of batches whose gradients a worker accumulates for one update.
            sees_gradients: Names of the user's hooks that may read or change gradients.
        """
        lines = [*self._different_steps(batch_size, accumulated)] if workers > 1 else []
        if self.data_dispatch == "dynamic":
            lines.append("faster workers take more of the batches")
        pushed = "changes of the weights" if self.mode == "local" else "gradients"
        for subject, compression in (
            (f"{pushed} are sent as", self.compression),
            ("forward and backward use weights that are sent as", self.pull_compression),
        ):
            if compression != "none":
                lines.append(f"{subject} {self._in_words(compression)}")
        if sees_gradients and self.mode != "local":
            lines.append(f"gradients are sent after {', '.join(sees_gradients)}")
            if workers > 1:
                lines[-1] += ", which sees the gradients of one worker's images, not the mean over the workers"
        weighted = self.aggregates and self.mode != "local"
        return lines + differences_of_replicas(module, workers, batch_size, "the workers' mean", weighted)

    def _different_steps(self, batch_size: int | None, accumulated: int) -> Iterator[str]:
        if self.mode == "local":
            yield "each worker makes its own steps"
            if (self.outer_lr, self.outer_momentum) == AVERAGING:
                yield f"weights are averaged every {self.sync_every} steps"
            else:
                outer = f"outer_lr {self.outer_lr:g}, outer_momentum {self.outer_momentum:g}"
                yield f"an outer step every {self.sync_every} steps, on the mean of the workers' changes ({outer})"
        elif not self.aggregates:
            images = "" if batch_size is None else f" on {batch_size * accumulated} images"
            yield f"each update is one worker's gradient{images}"
            if self.mode == "ssp":
                yield f"no worker is more than {self.staleness} steps ahead of the slowest"
            else:
                yield "a gradient may come from weights that are any number of updates old"

    def _in_words(self, compression: str) -> str:
        if compression == AUTO:
            return "the encoding that makes steps fastest, which may be as coarse as one bit per element"
        return payload_compression(compression).describe(self.topk_density)
