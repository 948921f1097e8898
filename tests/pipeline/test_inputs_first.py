"""The gradients of a stage's inputs come first, those of its weights after them, and all are what they always are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.inputs_first import InputsFirst
from cnnstrategies.pipeline.transport import BACKWARD, Transport


class Stage(nn.Module):
    """All that a convolution's or a linear layer's gradient may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 8, 3, stride=2, dilation=2, padding=(2, 1), groups=2, bias=False)
        self.same = nn.Conv2d(8, 8, 3, padding="same")
        self.circular = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))
        self.frozen, self.half_frozen = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.frozen.requires_grad_(False)
        self.half_frozen.weight.requires_grad_(False)
        self.rows, self.head = nn.Linear(3, 4), nn.Linear(8, 3, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, values: Tensor) -> Tensor:
        """Use one of them twice, and the weight of another once more."""
        values = F.relu(self.one(F.relu(self.one(values), inplace=True)) + values, inplace=True)
        values = self.circular(self.same(self.grouped(values)))
        values = self.normed(self.norm(values)) + self.half_frozen(self.frozen(values)) + self.circular.weight.mean()
        return self.head(self.rows(values).mean((2, 3)))


def run(inputs_first: bool, dtype: torch.dtype) -> tuple[list[Tensor | None], list[str], Tensor]:
    """The gradients, in which order they were there, and the output."""
    torch.manual_seed(0)
    stage, order = Stage(), []
    values = torch.randn(2, 4, 6, 7)
    if dtype is torch.float64:
        stage, values = stage.double(), values.double()
    leaf = values.requires_grad_()
    for name, tensor in (("inputs", leaf), *stage.named_parameters()):
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        if inputs_first:
            with InputsFirst(stage):
                output = stage(leaf)
        else:
            output = stage(leaf)
    # What a penalty on the gradient needs: backward of a part, and again.
    output.float().square().sum().backward(retain_graph=True)
    (slope,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    slope.square().sum().backward()
    return [leaf.grad, *(p.grad for p in stage.parameters())], order, output


@pytest.mark.light
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
def test_gradients_are_what_they_always_are(dtype: torch.dtype) -> None:
    """Whatever the layers are, a second time over the same graph and through a gradient's gradient too."""
    usual, _, usual_output = run(False, dtype)
    found, order, output = run(True, dtype)
    exact = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(output, usual_output, **exact)
    assert [one is None for one in found] == [one is None for one in usual]
    for one, other in zip(found, usual, strict=True):
        if one is not None:
            torch.testing.assert_close(one / other.norm(), other / other.norm(), **exact)
    first = order[: order.index("rows.weight") + 1]
    assert first.index("inputs") < first.index("rows.weight"), "a layer's weights wait for the stage's inputs"
    assert max(order.count(name) for name in order) == 2, "in each of the two backwards a hook is called once"


def last_stage() -> tuple[list[Tensor], list[str]]:
    """A rank's gradients, and in which order the last step sent and computed gradients."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    ).double()
    images, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(5, (8,))
    pipeline, order = Pipeline(network, ["2"], (1, 1), 2), []
    send = Transport.send

    def noted(self: Transport, tensor: Tensor, target: int, tag: int, what: str) -> Any:
        if tag == BACKWARD:
            order.append("sent")
        return send(self, tensor, target, tag, what)

    pipeline.transport.send = noted.__get__(pipeline.transport)
    for name, parameter in pipeline.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for _ in range(2):
        order.clear()
        pipeline.module.zero_grad()
        pipeline.step(images, targets, F.cross_entropy)
    found = [p.grad for p in pipeline.module.parameters()]
    pipeline.close()
    return found, order


def test_the_last_backward_sends_before_it_computes_the_gradients_of_weights() -> None:
    (_, first), (_, last) = run_ranks(2, last_stage)
    assert "sent" not in first
    assert sorted(last[:5]) == sorted(["5.bias", "5.weight", "3.bias", "3.weight", "sent"]), "the backward before"
    assert last[5] == "sent"
    assert sorted(last[6:]) == sorted(["5.bias", "5.weight", "3.bias", "3.weight"]), "each hook once"
