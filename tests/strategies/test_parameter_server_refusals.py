"""Tests of options and modules that the parameter server refuses, with a remedy, before any process starts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.checks import check_importable, check_module, check_optimizers
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

ARGUMENTS = [
    ({"staleness": 3}, "staleness=3 has no effect with mode='sync'"),
    ({"sync_every": 3}, "is for `mode: local`"),
    ({"data_dispatch": "dynamic"}, "dynamic` is for the modes async and ssp"),
    ({"mode": "local", "data_dispatch": "dynamic"}, "in mode local every worker makes the same number of steps"),
    ({"timeout": 0.0}, "timeout=0.0 is too short: it must be above 0 seconds"),
    ({"security": "some"}, "security='some': use one of auto, curve, none"),
    ({"max_restarts": -1}, "max_restarts=-1: use at least 0"),
    ({"endpoints": ["tcp://10.0.0.1:4000"]}, "coordinator: tcp://address:port"),
    (
        {"endpoints": ["tcp://10.0.0.1:4000"], "servers_per_node": 2, "coordinator": "tcp://10.0.0.1:1"},
        "leave one of the two options out",
    ),
    ({"coordinator": "tcp://[::1]:80"}, r"endpoint 'tcp://\[::1\]:80': the parameter server supports only IPv4"),
    (
        {"endpoints": ["tcp://fe80::1:80"], "coordinator": "tcp://10.0.0.1:80", "security": "none"},
        r"endpoint 'tcp://fe80::1:80': the .* in MASTER_ADDR",
    ),
    ({"key_file": "nowhere"}, "does not exist; make it with"),
    ({"combine_per_node": True, "mode": "async"}, "`combine_per_node: true` is for `mode: sync`"),
    ({"combine_per_node": True, "max_restarts": 1}, "a restarted worker cannot share the node's memory"),
    ({"outer_lr": 0.7}, "are for `mode: local`, not `mode: sync`"),
    ({"mode": "local", "outer_lr": 0.0}, "outer_lr=0.0: use a finite value above 0"),
    ({"mode": "local", "outer_lr": float("nan")}, "outer_lr=nan: use a finite value above 0"),
    ({"mode": "local", "outer_momentum": 1.0}, "outer_momentum=1.0: use 0 or more and less than 1"),
    (
        {"max_joiners": 2, "mode": "sync"},
        "max_joiners=2 is for mode async, and for mode ssp with a staleness above 0. In mode sync",
    ),
    ({"max_joiners": 2, "mode": "ssp", "staleness": 0}, "In mode ssp with staleness 0 all workers step together"),
    ({"max_joiners": 2, "mode": "async"}, "max_joiners=2 cannot be used with `data_dispatch: static`"),
    ({"max_joiners": -1, "mode": "async"}, "max_joiners=-1: use at least 0"),
]


def test_arguments_that_contradict_each_other_are_refused() -> None:
    for options, message in ARGUMENTS:
        with pytest.raises(ConfigurationError, match=message):
            ParameterServerStrategy(**options)
    ParameterServerStrategy(replication=2).options.check_nodes(2)  # The servers of all nodes count.


class WithModes(torch.optim.SGD):
    """An optimizer with separate weights for training and evaluation, like schedulefree's."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Module(LightningModule):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        for name, value in more.items():
            setattr(self, name, value)


class OwnClipping(Module):
    def configure_gradient_clipping(self, *_: Any) -> None: ...


def with_option(value: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(Module().parameters(), 0.1)
    optimizer.param_groups[0]["growth_rate"] = value
    return optimizer


def servers(**options: Any) -> ParameterServerOptions:
    return ParameterServerStrategy(**options).options


def fit_with(callback: Callback, start_method: Any, **options: Any) -> None:
    strategy = ParameterServerStrategy(start_method=start_method, **options)
    Trainer(accelerator="cpu", strategy=strategy, logger=False, callbacks=[callback]).fit(Module(), [torch.zeros(1)])


SPARSE = Module(words=nn.Embedding(3, 2, sparse=True))
GATHERS = Module(loss=nn.Module())
GATHERS.loss.sinkhorn_gather_distributed = True
BY_HAND = Module(automatic_optimization=False)
COMPILED = Module(automatic_optimization=False, _compiler_ctx={})
USES: dict[str, Callable[[], Any]] = {
    "SGD has growth_rate=inf in parameter group 0.* `mode: local` or strategy ddp": lambda: check_optimizers(
        [with_option(math.inf)], servers()
    ),
    "WithModes keeps separate weights .* `mode: local`": lambda: check_optimizers(
        [WithModes(Module().parameters(), 0.1)], servers(mode="async")
    ),
    r"loss.sinkhorn_gather_distributed=True gathers .* in `mode: async` .* use `mode: sync` or strategy ddp": lambda: (
        check_module(GATHERS, servers(mode="async"))
    ),
    "Module sets automatic_optimization=False, .* with `mode: local`: use `mode: sync`, `async` or `ssp`": lambda: (
        check_module(BY_HAND, servers(mode="local"))
    ),
    "Module sets automatic_optimization=False, .* `combine_per_node: true`: set it to false": lambda: check_module(
        BY_HAND, servers(combine_per_node=True)
    ),
    "Module sets automatic_optimization=False, .* of the whole module, .* compile the module's networks": lambda: (
        check_module(COMPILED, servers())
    ),
    r"words is Embedding\(sparse=True\).* use sparse=False": lambda: check_module(SPARSE, servers()),
    r"OwnClipping\.configure_gradient_clipping would clip": lambda: check_module(OwnClipping(), servers()),
    "StochasticWeightAveraging writes averaged weights": lambda: fit_with(StochasticWeightAveraging(0.1), "fork"),
    "BatchSizeFinder does not work .* run it on one device": lambda: fit_with(BatchSizeFinder(), "fork"),
    "LearningRateFinder does not work .* run it on one device": lambda: fit_with(LearningRateFinder(), "popen"),
    "replication=2 needs at least 2 servers": lambda: fit_with(Callback(), "popen", replication=2),
}


def test_modules_and_callbacks_that_servers_cannot_support_are_refused_with_a_remedy() -> None:
    for message, use in USES.items():
        with pytest.raises(ConfigurationError, match=message):
            use()


def test_an_optimizer_of_the_script_itself_is_refused_unless_servers_are_forked() -> None:
    optimizer = WithModes(Module().parameters(), 0.1)
    check_importable(optimizer, servers(), forked=False)
    for module in ("__main__", "__mp_main__"):
        kind = type("InScript", (torch.optim.SGD,), {"__module__": module})
        optimizer = kind(Module().parameters(), 0.1)
        check_importable(optimizer, servers(), forked=True)
        check_importable(optimizer, servers(mode="local"), forked=False)
        with pytest.raises(ConfigurationError, match=r"InScript is defined in the script .* parameter_server_fork"):
            check_importable(optimizer, servers(), forked=False)


def test_mode_local_allows_what_each_worker_does_separately() -> None:
    local = servers(mode="local")
    for module in (SPARSE, OwnClipping()):
        check_module(module, local)
    for optimizer in (with_option(math.inf), WithModes(Module().parameters(), 0.1)):
        check_optimizers([optimizer], local)
    check_optimizers([with_option(2.0)], servers())
    for module in (GATHERS, BY_HAND):
        check_module(module, servers())


def test_a_mode_without_options_has_useful_defaults() -> None:
    ssp, local, sync = (ParameterServerStrategy(mode).options for mode in ("ssp", "local", "sync"))
    assert (ssp.staleness, local.sync_every) == (4, 8)
    assert (sync.staleness, sync.sync_every) == (0, 1)
    assert ParameterServerStrategy("ssp", staleness=0).options.aggregates, (
        "an explicit 0 is not replaced by the default"
    )
