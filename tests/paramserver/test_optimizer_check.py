"""Optimizers that would make different steps on servers are refused by name, and all others make equal steps."""

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.optimizer_check import check_on_servers
from cnnstrategies.paramserver.optimizers import FusedOptimizer
from cnnstrategies.paramserver.slicing import cut, largest_payload
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.checks import check_optimizers
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions


class Own(torch.optim.Optimizer):
    """An optimizer whose step of a parameter is the method `change`."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.parameters():
            parameter -= self.param_groups[0]["lr"] * self.change(parameter, parameter.grad)


class NormOfAll(Own):
    """Like LAMB, which clips by the norm of all gradients."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient / sum(float(p.grad.norm()) for p in self.parameters())  # type: ignore[union-attr]


class Drawing(Own):
    """Like Gravity, whose momentum begins with random numbers."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Argument(Own):
    """An optimizer with an argument that is not in its parameter groups."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__(params, lr)
        self.factor = factor

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return self.factor * gradient


class Wrapping(Own):
    """Like Lookahead, which is made from an optimizer and not from parameters alone."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, inner: str) -> None:
        super().__init__(params, lr)
        self.inner = inner


class CommonState(Own):
    """An optimizer whose state has an entry that does not belong to a parameter."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        common: Any = self.state["all"]  # type: ignore[index]
        common["steps"] = common.get("steps", 0) + 1
        return gradient / common["steps"]


class WithoutGradients(Own):
    """An optimizer that changes parameters without a gradient."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter *= 0.9


class ObjectInState(Own):
    """Like Conda, whose state has objects of its own class."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self.state[parameter].setdefault("projector", type("Projector", (), {})())
        return gradient


class NeedsClosure(Own):
    """Like SAM, which evaluates the loss twice."""

    def step(self, closure: Any = None) -> None:
        closure()
        super().step(closure)


class WholeTensors(Own):
    """Like Shampoo and AdaShift: a list of matrices, a dictionary with numbers as keys and a deque in the state."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            sizes = gradient.shape or (1,)
            state["matrices"] = [gradient.new_zeros(size, size) for size in sizes]
            state["momenta"] = {0.5: torch.zeros_like(gradient), 0.9: torch.zeros_like(gradient)}
            state["last"] = deque(maxlen=2)
        for dimension, matrix in enumerate(state["matrices"]):
            rows = gradient.movedim(dimension, 0).reshape(len(matrix), -1)
            matrix += rows @ rows.T
            turned = torch.linalg.solve(matrix + torch.eye(len(matrix)).to(matrix), rows)
            gradient = turned.reshape(gradient.movedim(dimension, 0).shape).movedim(0, dimension)
        state["last"].append(gradient.clone())
        for decay, momentum in state["momenta"].items():
            momentum.mul_(decay).add_(state["last"][0])
        return sum(state["momenta"].values()) / parameter.norm()  # type: ignore[return-value]


class KeepsGradients(Own):
    """An optimizer that keeps the gradient of the last step itself, and changes the gradient of this step."""

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        last = self.state[parameter].get("last", torch.zeros_like(gradient))
        self.state[parameter]["last"] = gradient
        return gradient.mul_(2).add(last)


def test_an_optimizer_may_keep_and_change_gradients_whose_memory_the_server_uses_again() -> None:
    served, expected = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    on_server, alone = FusedOptimizer(KeepsGradients, [([served], {"lr": 0.1})]), KeepsGradients([expected])
    memory = torch.zeros(3, dtype=torch.float64)
    for factor in (1.0, 3.0, -2.0):
        memory.fill_(factor)
        on_server.step([(served, memory)], [{"lr": 0.1}])
        assert memory.tolist() == [factor] * 3
        expected.grad = torch.full_like(expected, factor)
        alone.step()
    torch.testing.assert_close(served, expected)


REFUSED = {
    Drawing: "Drawing draws random numbers",
    CommonState: "CommonState .*",
    WithoutGradients: "WithoutGradients changes parameters that have no gradient",
    ObjectInState: "ObjectInState fails with made-up gradients .CodecError",
    NeedsClosure: "NeedsClosure fails with made-up gradients .TypeError",
}


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(8, 5))


def test_optimizers_that_servers_cannot_run_are_refused_by_name() -> None:
    drawn = torch.get_rng_state()
    made: list[tuple[torch.optim.Optimizer, str]] = [
        *((kind(network().parameters()), message) for kind, message in REFUSED.items()),
        (Argument(network().parameters(), factor=0.5), "Argument makes different steps on servers"),
        (Wrapping(network().parameters(), 0.1, "SGD"), "Wrapping fails with made-up gradients .TypeError"),
    ]
    for optimizer, message in made:
        torch.set_rng_state(drawn)
        before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
        with pytest.raises(ConfigurationError, match=f"{message}.*strategy ddp"):
            check_on_servers(optimizer)
        after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(map(torch.equal, after, before)), "the optimizer itself is not changed"
        assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), drawn)


class Counting(Own):
    """Like many published optimizers, which count steps in their parameter groups, as a number or a tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["corrected"] = group.get("corrected", torch.zeros(())) + 1
        super().step(closure)

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return gradient / self.param_groups[0]["step"] / self.param_groups[0]["corrected"]


class OwnGroups(Own):
    """An optimizer that makes its parameter groups itself, from parameters and not from groups."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        parameters = [parameter.requires_grad_() for parameter in params]
        super().__init__(({"params": [p], "lr": 0.1 * number} for number, p in enumerate(parameters, 1)))  # type: ignore[arg-type]

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        (lr,) = (group["lr"] for group in self.param_groups if any(p is parameter for p in group["params"]))
        return gradient * lr / self.param_groups[0]["lr"]


class NeedsEntry(Own):
    """Like some variants of Muon, whose parameter groups need an entry that is not an argument."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        groups = list(params)
        assert all("scale" in group for group in groups)
        super().__init__(groups, lr)

    def change(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        return self.param_groups[0]["scale"] * gradient


def test_servers_make_an_optimizer_from_parameters_or_from_groups() -> None:
    for optimizer in (
        OwnGroups(network().parameters()),
        NeedsEntry([{"params": list(network().parameters()), "scale": 0.5}]),
    ):
        assert not check_on_servers(optimizer).is_joint


def test_an_optimizer_that_mixes_parameters_has_all_of_them_on_one_server() -> None:
    module = network()
    optimizer = NormOfAll(module.parameters())
    assert check_on_servers(optimizer).is_joint
    specification = Specification.of(module.named_parameters(), optimizer, 1, servers=3, is_joint=True)
    assert {slice_.servers for slice_ in cut(specification)} == {(0,)}
    with pytest.raises(ConfigurationError, match="is_joint=True works only with mode='sync', replication=1"):
        Specification.of(module.named_parameters(), optimizer, 1, servers=3, is_joint=True, replication=2)


def options_of(**options: Any) -> ParameterServerOptions:
    return ParameterServerStrategy(**options).options


@pytest.mark.parametrize("mode", ["async", "replication"])
def test_an_optimizer_that_mixes_parameters_needs_common_steps_and_one_copy(mode: str) -> None:
    options = {
        "async": options_of(mode="async"),
        "replication": options_of(replication=2, servers_per_node=2),
    }
    message = {"async": "`mode: async`: use `mode: sync`", "replication": "`replication: 2`: use `replication: 1`"}
    with pytest.raises(ConfigurationError, match=f"NormOfAll changes a parameter depending on .* {message[mode]}"):
        check_optimizers([NormOfAll(network().parameters())], options[mode])
    two = [NormOfAll(network().parameters()), torch.optim.SGD(network().parameters(), 0.1)]
    with pytest.raises(ConfigurationError, match=r"NormOfAll changes a .* with 2 optimizers"):
        check_optimizers(two, options_of())


def test_counts_of_steps_are_sent_so_that_parameters_without_gradients_have_the_right_count() -> None:
    module = network()
    optimizer = Counting(module.parameters())
    (served,) = check_optimizers([optimizer], options_of())
    assert dict(served.counters) == {"step": 0, "corrected": torch.zeros(())}
    served.add_counters(optimizer)
    optimizer.step(lambda: None)
    assert json.loads(json.dumps(hyperparameters(optimizer)))[0] == {
        "lr": 0.1, "step": 1, "corrected": {"value": 1.0, "dtype": "float32"},
    }  # fmt: skip
    assert not check_optimizers([optimizer], options_of(mode="async"))[0].counters


def test_an_optimizer_that_needs_whole_tensors_keeps_each_parameter_on_one_server() -> None:
    module = network()
    optimizer = WholeTensors(module.parameters())
    check_on_servers(optimizer)
    check_on_servers(Argument(module.parameters()))
    specification = Specification.of(module.named_parameters(), optimizer, 1, servers=2, slice_bytes=64)
    slices = cut(specification)
    assert [slice_.shape for slice_ in slices] == [tuple(parameter.shape) for parameter in module.parameters()]
    # The state has a square matrix for each dimension, which is larger than a bias.
    assert largest_payload([slices[-1]]) >= 8 * (5 * 5 + 3 * 5)
