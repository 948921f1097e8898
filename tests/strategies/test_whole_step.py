"""Options of the whole step, and which network it divides."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies import ConfigurationError, ImageClassifier, ImageSegmenter
from cnnstrategies.commands.plan.measured import _request
from cnnstrategies.strategies.hybrid_pipeline.base import PipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.network import WHOLE, DividedForward, find_network
from cnnstrategies.strategies.hybrid_pipeline.order import check_run_ahead, describe_order, has_own_steps

pytestmark = pytest.mark.light


def test_stages_run_ahead_only_in_the_order_1f1b() -> None:
    check_run_ahead(True, Declaring(), "1f1b")
    check_run_ahead(False, Own(), "1f1b")
    with pytest.raises(ConfigurationError, match=r"run_ahead=True: .*; leave run_ahead out, or give Own a method loss"):
        check_run_ahead(True, Own(), "1f1b")
    with pytest.raises(ConfigurationError, match=r"run_ahead=True: .*; leave run_ahead out, or schedule: 1f1b"):
        check_run_ahead(True, Declaring(), "gpipe")


def test_the_start_panel_says_which_order_runs() -> None:
    def text(module: LightningModule, schedule: str = "1f1b", reason: str | None = None, again: str = "never") -> str:
        declared = SimpleNamespace(reason=reason) if isinstance(module, Declaring) else None
        runner = SimpleNamespace(activation_checkpointing=again)
        return describe_order(SimpleNamespace(declared=declared, runner=runner), module, schedule)

    assert text(Declaring(), "gpipe") == "gpipe, as configured"
    assert "for 1f1b, give Own a method loss(outputs, targets)" in text(Own())
    assert text(Declaring()).startswith("gpipe in the first step, then 1f1b if training_step trains Declaring.loss")
    assert text(Declaring(), reason="it draws").endswith("stores the activations of all microbatches: it draws")
    assert text(Declaring(), reason="it draws", again="always").endswith("the inputs of all microbatches: it draws")


class OwnLoss(ImageClassifier):
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets)


class OwnStep(ImageClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def test_only_steps_of_the_package_itself_are_checked_late() -> None:
    network = nn.Linear(2, 2)
    assert has_own_steps(ImageClassifier(network, 2))
    assert has_own_steps(ImageSegmenter(network, 2))
    for module in (OwnLoss(network, 2), OwnStep(network, 2), Own(), Declaring()):
        assert not has_own_steps(module)
    replaced: Any = ImageClassifier(network, 2)
    replaced.loss = nn.functional.cross_entropy
    assert not has_own_steps(replaced)


def test_the_plan_is_for_the_schedule_that_runs() -> None:
    options = {name: value.default for name, value in inspect.signature(PipelineStrategy).parameters.items()}
    strategy = SimpleNamespace(class_path="cnnstrategies.strategies.HybridPipelineStrategy", init_args=options)
    for module, schedule in ((Own(), "gpipe"), (Declaring(), "1f1b")):
        request = _request(strategy, module)
        assert request is not None
        assert request.schedule == schedule


class Parts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(2, 2), nn.Linear(8, 8)


class Own(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(x))


class Declaring(Own):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def test_the_network_is_the_child_with_all_parameters_or_the_own_forward_or_the_largest_child() -> None:
    module = LightningModule()
    module.network = Parts()
    module.loss = nn.CrossEntropyLoss()
    assert find_network(module, None) == "network"
    module.scale = nn.Parameter(torch.ones(()), requires_grad=False)
    assert find_network(module, None) == "network", "a frozen parameter may be outside of the network"
    assert find_network(Own(), None) == WHOLE
    assert find_network(Parts(), None) == "large"
    assert find_network(module, "network.small") == "network.small"
    with pytest.raises(ConfigurationError, match="submodule='net': LightningModule has no submodule of this name"):
        find_network(module, "net")
    with pytest.raises(ConfigurationError, match="no submodule has parameters"):
        find_network(LightningModule(), None)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def test_a_call_with_other_values_runs_the_networks_own_code_and_warns_once() -> None:
    class Placed(SimpleNamespace):
        def __call__(self, images: Tensor) -> str:
            return f"{len(images)} samples in stages"

    network, x = Scaled(), torch.ones(2, 3)
    forward = DividedForward(Placed(division=SimpleNamespace(network=network, parameters=list), copies=[]))
    assert network(x) == network(x, scale=1.0) == "2 samples in stages"
    with pytest.warns(UserWarning, match="Scaled is called with other values than tensors .* without microbatches"):
        assert torch.equal(network(x, scale=2.0), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network(x, 3.0)
    forward.remove()
    assert torch.equal(network(x), x)
