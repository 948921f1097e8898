"""Modules with several optimizers and manual optimization train the weights of one device, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD, Adam

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.joined_optimizers import joined
from cnnstrategies.paramserver.specification import STEP_CLIP_NORM, STEP_CLIP_VALUE
from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.checks import watch_gradients
from cnnstrategies.strategies.parameter_server.step_values import StepClips
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart
from tests.strategies.adversaries import COMPILED, KINDS, OtherOrder, train
from tests.strategies.digit_runs import assert_same_run

STRATEGIES: dict[str, Callable[[], Any]] = {
    "servers": partial(ParameterServerStrategy, start_method="fork", servers_per_node=2),
    # jsonargparse passes the defaults of DDP, too, if a configuration names the strategy's class.
    "ddp_balanced": partial(BalancedDDPStrategy, start_method="fork", shares=[3, 1], find_unused_parameters=False),
}


def check(kinds: list[str], strategy: str) -> None:
    expected, trained = train(kinds, lambda: "auto", 1), train(kinds, STRATEGIES[strategy], 2)
    for kind in kinds:
        assert_same_run(trained[kind], expected[kind], 1e-11)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_optimizers_make_the_steps_of_one_device(strategy: str) -> None:
    check(list(KINDS), strategy)


def test_one_worker_with_steps_of_its_own_equals_one_device() -> None:
    strategy = partial(ParameterServerStrategy, start_method="fork", servers_per_node=2, mode="async")
    expected, trained = train(list(KINDS), lambda: "auto", 1), train(list(KINDS), strategy, 1)
    for kind in KINDS:
        assert_same_run(trained[kind], expected[kind], 1e-11)


@pytest.mark.parametrize("options", [{"mode": "async"}, {"mode": "ssp", "staleness": 1}], ids=["async", "ssp"])
def test_workers_with_steps_of_their_own_lose_no_step(options: dict[str, Any]) -> None:
    strategy = partial(ParameterServerStrategy, start_method="fork", servers_per_node=2, **options)
    state = train(["ConstantSlopes"], strategy, 2)["ConstantSlopes"]["state_dict"]
    # Two workers with four batches each make eight steps of the first layer and four of the second.
    assert [float(weight[0]) for weight in state.values()] == [-0.25 * 8, -0.25 * 4]


@pytest.mark.cluster
def test_a_compiled_module_may_toggle_optimizers() -> None:
    check(list(COMPILED), "ddp_balanced")


def test_servers_end_a_run_whose_ranks_step_different_optimizers() -> None:
    def run() -> str:
        with pytest.raises(Exception) as error:  # noqa: PT011 - of a class that the launcher makes
            quiet_trainer(STRATEGIES["servers"](), 2, max_epochs=1, use_distributed_sampler=False).fit(OtherOrder())
        return str(error.value)

    expected = "rank 1 calls step of Adam (with critic.conv1.weight) while rank 0 calls step of Adam (with generator."
    assert expected in run_apart(run)


class ToldError(Exception):
    """Torch was told its number of threads."""


@pytest.mark.light
@pytest.mark.parametrize(
    ("strategy", "method"),
    [(BalancedDDPStrategy(), "setup_environment"), (ParameterServerStrategy(), "setup_distributed")],
)
def test_a_rank_creates_its_thread_pool_before_compiled_code_would(
    strategy: DDPStrategy, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a forked run have aborted with "Invalid thread pool!" in their first backward."""

    def note(count: int) -> None:
        raise ToldError(count)

    monkeypatch.setattr(torch, "set_num_threads", note)
    monkeypatch.setattr(strategy, "_lightning_module", LightningModule())
    with pytest.raises(ToldError):
        getattr(strategy, method)()


class ByHand(LightningModule):
    """A module whose step does what servers cannot do right."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.automatic_optimization, self.kind = False, kind
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Any) -> None:
        if self.kind == "norm":
            self.net(batch).sum().backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        else:
            slopes = torch.autograd.grad(self.net(batch).sum(), [self.net.weight])
            self.net.weight.grad = slopes[0].sign()


@pytest.mark.light
def test_steps_that_compute_nonlinear_functions_of_gradients_are_refused() -> None:
    for kind, function in (("norm", "norm"), ("grad", "sign")):
        module = ByHand(kind)
        watch = watch_gradients(module, [])
        with pytest.raises(
            ConfigurationError, match=rf"ByHand.training_step computes .*{function}.* of the gradient of net"
        ):
            module.training_step(torch.ones(1, 2))
        watch.end()


@pytest.mark.light
def test_clipping_that_servers_would_do_at_another_point_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, clips = SGD([parameter], 0.1), StepClips({id(parameter): "weight"})
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    clips.note(optimizer, STEP_CLIP_NORM, 1.0, [parameter])
    with pytest.raises(ConfigurationError, match="clip_gradients was called twice before a step of SGD"):
        clips.note(optimizer, STEP_CLIP_VALUE, 1.0, [parameter])
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match="changed after clip_gradients and before the step of SGD"):
        clips.take(optimizer)
    clips.note(optimizer, STEP_CLIP_VALUE, 0.5, [parameter])
    assert clips.take(optimizer) == {STEP_CLIP_NORM: 0.0, STEP_CLIP_VALUE: 0.5}
    assert not any(clips.take(optimizer).values())
    parameter.register_post_accumulate_grad_hook(clips.check_kept)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match="gradient of weight was kept after a step with clip_gradients"):
        parameter.sum().backward()  # type: ignore[no-untyped-call]
    clips.note(optimizer, STEP_CLIP_NORM, 1.0, [parameter])
    clips.take(optimizer)
    optimizer.zero_grad(set_to_none=False)
    parameter.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.light
def test_a_parameter_in_two_optimizers_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError, match="1 parameters are in several of the 2 optimizers"):
        joined([SGD([parameter], 0.1), Adam([parameter])])
