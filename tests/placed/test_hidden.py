"""Optimizers whose steps see the gradients of a rank's own parameters only, compared with one device."""

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.optimizer_trial import is_elementwise
from cnnstrategies.placed import Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from tests.placed.placements import compare
from tests.placed.turns import on_ranks, outcomes

AT = [(0,), (1,), None, (1,)]
STEPS = 4


class Plain(torch.optim.Optimizer):
    """An optimizer that counts its steps by a number, reads the loss, and replaces the storages of parameters."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.rate = 1.0 if loss is None else 1 / (1 + abs(float(loss)))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, self.state[parameter], group["lr"])
        return loss

    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        state["count"] = state.get("count", 0) + 1
        state["parts"] = [gradient.abs().max(), gradient * 2]
        parameter.data = parameter.data - lr * self.rate / state["count"] * gradient / gradient.norm().item()


class NormOfAll(Plain):
    """An optimizer whose steps depend on the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
        super().step()
        return loss

    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        parameter.data.sub_(lr * gradient / self.norm)


class Counting(NormOfAll):
    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        state["count"] = state.get("count", 0) + 1
        state["mean"] = 0.5 * state.get("mean", 0) + gradient
        parameter.data.sub_(lr * state["mean"] / self.norm / state["count"])


class Noisy(Plain):
    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        parameter.data.sub_(lr * (gradient + 0.1 * torch.randn_like(gradient)))


class Clearing(Plain):
    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        parameter.data.sub_(lr * gradient)
        parameter.grad = None


SEPARATE = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd_without_state": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "plain": Plain,
}
OTHERS = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, line_search_fn="strong_wolfe"),
    "norm": NormOfAll,
    "counting": Counting,
    "noisy": Noisy,
    "clearing": Clearing,
}


class Program:
    """A program whose hooks read the gradients before and after each step."""

    def __init__(self, make: Any, places: Places | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        self.parameters = []
        for index, place in enumerate(AT):
            shape = (4,) if index == 3 else (3, 4)
            parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            if places is not None and place is not None:
                if places.rank in place:
                    places.mark(parameter, place, f"p{index}")
                else:
                    places.put_away(parameter, place, f"p{index}")
            self.parameters.append(parameter)
        self.optimizer = make(self.parameters)
        self.read: list[float] = []
        self.optimizer.register_step_pre_hook(self.look)
        self.optimizer.register_step_post_hook(self.look)
        self.hidden = None if places is None else hide_foreign_gradients(places, self.optimizer)
        self.optimizer.register_step_pre_hook(self.look)
        self.optimizer.register_step_post_hook(self.look)

    def look(self, *_: Any) -> None:
        self.read += [-1.0 if p.grad is None else p.grad.norm().item() for p in self.parameters]

    def loss(self) -> Tensor:
        a, b, c, d = self.parameters
        return (a * b).sum().sin() + (b * c.exp()).mean() + (d.square() * a).sum() * 0.1

    def run(self, with_closure: bool) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            return loss

        for _ in range(STEPS):
            if with_closure:
                self.read.append(self.optimizer.step(closure).item())
            else:
                closure()
                self.optimizer.step()


def check(name: str, make: Any, is_separate: bool) -> None:
    with_closure = name in ("lbfgs", "adamw", "rmsprop", "plain")
    expected = Program(make)
    expected.run(with_closure)

    def on_rank(places: Places) -> None:
        program = Program(make, places)
        assert program.hidden is not None
        assert program.hidden.hides == is_separate
        program.run(with_closure)
        torch.testing.assert_close(program.read, expected.read, rtol=1e-12, atol=1e-12)
        compare(places, program.parameters, expected.parameters)
        state, wanted = program.optimizer.state_dict(), copy.deepcopy(expected.optimizer.state_dict())
        if name == "plain":  # Numbers in the state of another rank's parameter are left out.
            for index, entries in wanted["state"].items():
                assert state["state"][index].pop("count", STEPS) == entries.pop("count")
        compare(places, state, wanted)
        assert list(state["state"]) == list(wanted["state"])
        for entries in program.optimizer.state.values():
            for value in entries.values():
                if isinstance(value, Tensor):
                    value.sum().item()

    on_ranks(2, on_rank)


# torch asks how many GPUs there are, so each of these tests has its own process.
def test_an_optimizer_that_treats_each_parameter_by_itself_steps_as_on_one_device() -> None:
    for name, make in SEPARATE.items():
        check(name, make, True)


def test_an_optimizer_that_mixes_parameters_sees_all_gradients() -> None:
    for name, make in OTHERS.items():
        check(name, make, False)


OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
}


def test_torchs_own_optimizers_keep_the_memory_of_parameters_gradients_and_state() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and is_elementwise(kind)]
    assert len(kinds) > 8
    for kind in kinds:
        for foreach in (True, False):
            parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer: Any = kind(parameters, lr=0.1, foreach=foreach, **OPTIONS.get(kind.__name__, {}))
            known: list[Any] = []  # Memory that is not freed cannot be the memory of a new tensor.
            for _ in range(4):
                optimizer.step()
                tensors = [*parameters, *(parameter.grad for parameter in parameters)]
                tensors += [leaf for state in optimizer.state.values() for leaf in state.values()]
                known.append([leaf.untyped_storage() for leaf in tensors if isinstance(leaf, Tensor)])
            pointers = [[storage.data_ptr() for storage in storages] for storages in known]
            assert all(row == pointers[0] for row in pointers), (kind, foreach)


def test_a_users_own_zero_grad_stays() -> None:
    def on_rank(places: Places) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
        hide_foreign_gradients(places, optimizer).remove()
        assert "zero_grad" not in vars(optimizer)
        users: Any = partial(optimizer.zero_grad, set_to_none=False)
        optimizer.zero_grad = users  # type: ignore[method-assign]
        hidden = hide_foreign_gradients(places, optimizer)
        assert optimizer.zero_grad is users
        hidden.remove()
        assert optimizer.zero_grad is users

    on_ranks(1, on_rank)


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, which does not call the constructor of its base class, as timm's Lookahead."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.AdamW(parameters, 0.1)
        self.defaults, self.param_groups, self.state = self.inner.defaults, self.inner.param_groups, self.inner.state
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def resume(make: Any, states: Any, places: Places | None = None) -> Program:
    program = Program(make, places)
    program.optimizer.load_state_dict(copy.deepcopy(states))
    program.run(with_closure=True)
    return program


def test_a_loaded_state_gets_the_places_of_the_parameters() -> None:
    for make in (SEPARATE["adamw"], SEPARATE["plain"], OTHERS["lbfgs"], OTHERS["counting"], Wrapping):
        first = Program(make)
        first.run(with_closure=True)
        states = first.optimizer.state_dict()
        expected = resume(make, states)

        def on_rank(places: Places, make: Any = make, states: Any = states, expected: Any = expected) -> None:
            program = resume(make, states, places)
            torch.testing.assert_close(program.read, expected.read, rtol=1e-12, atol=1e-12)
            compare(places, program.parameters, expected.parameters)
            for parameter in program.parameters:
                for value in program.optimizer.state[parameter].values():
                    for leaf in value if isinstance(value, list) else [value]:
                        if isinstance(leaf, Tensor) and leaf.dim():
                            # LBFGS keeps values of all parameters in the state of the first one.
                            if leaf.shape == parameter.shape:
                                assert places.place_of(leaf) == places.place_of(parameter)
                            leaf.sum().item()

        on_ranks(2, on_rank)


class Failing(Plain):
    def change(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        raise RuntimeError(f"no step of {tuple(parameter.shape)}")


def test_an_error_in_a_step_is_not_hidden_by_another_error() -> None:
    _, errors = outcomes(2, lambda places: Program(Failing, places).run(with_closure=False))
    assert all("no step of" in str(error) for error in errors)
