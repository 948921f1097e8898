"""Whether a strategy's arguments agree with each other."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.security import check_endpoint, is_local

if TYPE_CHECKING:
    from cnnstrategies.strategies.parameter_server.options import Options

AVERAGING = (1.0, 0.0)  # outer_lr and outer_momentum: the outer step ends at the mean of the workers' weights


def check_together(options: "Options") -> None:
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


def _check_own_steps(options: "Options") -> None:
    if options.sync_every < 1:
        raise ConfigurationError(f"sync_every={options.sync_every}: average every 1 step or more; 4 to 16 is usual")
    if options.sync_every > 1 and options.mode != "local":
        raise ConfigurationError(
            f"sync_every={options.sync_every} is for mode: local, not mode: {options.mode}; leave it out"
        )


def _check_outer_step(options: "Options") -> None:
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


def _check_times(options: "Options") -> None:
    if options.max_restarts < 0:
        raise ConfigurationError(f"max_restarts={options.max_restarts} is negative; 0 restarts no process")
    if not 0 < options.timeout < math.inf:
        raise ConfigurationError(f"timeout={options.timeout}: use a number of seconds above 0; 10 is usual")


def _check_dispatch(options: "Options") -> None:
    if options.data_dispatch == "dynamic" and options.mode not in ("async", "ssp"):
        raise ConfigurationError(
            f"data_dispatch: dynamic is for mode: async and ssp: in mode: {options.mode} every worker makes the same "
            "number of steps; use data_dispatch: static"
        )


def _check_elastic(options: "Options") -> None:
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


def _check_combining(options: "Options") -> None:
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


def _check_places(options: "Options") -> None:
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
