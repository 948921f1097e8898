"""Tests of values that forwards store outside of modules, and of the comparison of the stages with the network."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.rehearsal import REHEARSED, rehearse, rehearsed
from cnnstrategies.pipeline.stored_watch import StoredWatch

pytestmark = pytest.mark.light

VALUES: list[Any] = []
LAST: Any = None
STORE = SimpleNamespace(last=0)
TABLES: dict[str, Any] = {}


class Slots:
    __slots__ = ("last",)
    last: Any


SLOTS = Slots()


def note(value: Any) -> None:
    TABLES["noted"] = value


def enclosed() -> tuple[type[nn.Module], Callable[[], Any]]:
    count = 0
    values: list[Any] = []

    class Enclosed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            values.append(x)
            return x

    return Enclosed, lambda: (count, len(values))


class Outside(nn.Module):
    """A module that stores values in variables outside of its attributes."""

    shared: ClassVar[list[Any]] = []
    latest: Any = 1

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        match self.how:
            case "list":
                VALUES.append(x)
            case "variable":
                LAST = x
            case "object":
                STORE.last = x
            case "slots":
                SLOTS.last = x
            case "function":
                note(x)
            case "class's list":
                self.shared.append(x)
            case "class's attribute":
                type(self).latest = x
        return x


def content() -> list[Any]:
    return [*VALUES, LAST, STORE.last, getattr(SLOTS, "last", 2), *TABLES.items(), *Outside.shared, Outside.latest]


WHERE = ("list", "variable", "object", "slots", "function", "class's list", "class's attribute")


@pytest.mark.parametrize("how", WHERE)
def test_values_outside_of_modules_are_taken_away_and_stored_again(how: str) -> None:
    network, x = nn.Sequential(nn.Identity(), Outside(how)), torch.tensor(5.0)
    watch, before = StoredWatch(network), content()
    watch.begin()
    network(x)
    assert len(content()) > len(before) or content() != before
    stored = watch.take()
    assert content() == before
    ((key, value),) = stored.items()
    assert key.is_outside
    assert (value if key.kind == "set" else value[0]) is x
    watch.put(key, value)
    after = content()
    assert any(element is x or (isinstance(element, tuple) and element[1] is x) for element in after)
    watch.take()
    assert content() == before


class Holder(nn.Module):
    """A module with attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.items, self.table = 1.0, [2.0], {"a": self}
        self.inner = nn.Linear(1, 1)
        self.register_buffer("kept", torch.zeros(1))


def rename(table: dict[str, Any]) -> None:
    table["b"] = table.pop("a")


# Changes of a holder, and what they store.
CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "number": (lambda holder: setattr(holder, "number", 2.0), ["set"]),
    "deleted": (lambda holder: delattr(holder, "number"), ["delete"]),
    "list": (lambda holder: holder.items.append(3.0), ["append"]),
    "element": (lambda holder: holder.items.__setitem__(0, 3.0), ["replace"]),
    "key": (lambda holder: rename(holder.table), ["set", "delete"]),
    "buffer": (lambda holder: holder.kept.add_(1), ["values"]),
    "hook": (lambda holder: holder.inner.register_forward_hook(print), []),
    "table of hooks": (lambda holder: setattr(holder.inner, "_forward_hooks", OrderedDict()), []),
    "module": (lambda holder: setattr(holder, "inner", nn.Linear(1, 1)), []),
    "parameter": (lambda holder: holder.inner.register_parameter("other", nn.Parameter(torch.ones(1))), []),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("changes_between", [False, True])
def test_each_change_is_noticed_in_later_calls(how: str, changes_between: bool) -> None:
    network = nn.Sequential(Holder(), nn.Sequential(nn.ReLU()))
    change, kinds = CHANGES[how]
    watch = StoredWatch(network)
    watch.begin()
    for step in range(3):
        if changes_between:
            network[0].number = 10.0 + step
        state = watch.begin()
        assert watch.state is state
        assert not watch.take()
    if changes_between:
        network[0].number = 20.0
        assert watch.begin() is state, "only a number has changed"
    before = network[0].number
    with torch.no_grad():
        change(network[0])
    assert watch.state is not state
    assert (watch.new_modules() is not None) == (how in ("module", "parameter"))
    assert [key.kind for key in watch.take()] == kinds
    assert network[0].number == before
    assert (network[0].items, list(network[0].table), float(network[0].kept)) == ([2.0], ["a"], 0)
    assert not watch.take()


def test_numbers_that_alternate_are_those_of_the_last_call() -> None:
    network = nn.Sequential(Holder(), nn.Sequential(nn.ReLU()))
    watch, holder = StoredWatch(network), network[0]
    noted = []
    for number in (1.0, 0.5, 0.25, 0.5, 0.25, 0.5, 1.0):
        holder.number = number
        watch.begin()
        noted.append((watch.noted(), number))
        assert not watch.take()
        holder.number = 7.0
        assert [key.kind for key in watch.take()] == ["set"]
        assert holder.number == number
    for state, number in noted:
        assert state.run(lambda: holder.number)[0] == number
    assert holder.number == 1.0


def test_variables_of_enclosing_functions_are_taken_away_and_stored_again() -> None:
    kind, read = enclosed()
    network = kind()
    watch = StoredWatch(network)
    watch.begin()
    network(torch.ones(2))
    assert read() == (1, 1)
    stored = watch.take()
    assert read() == (0, 0)
    for key, value in stored.items():
        watch.put(key, value)
    assert read() == (1, 1)


class Passing(nn.Module):
    """A network whose second part may read what its first part has stored in the same forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.keep, self.use = Part(how, self.first, []), Part(how, self.second, [])
        self.use.source.append(self.keep)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.use(self.keep(x))
        return result


class Part(nn.Module):
    def __init__(self, how: str, layer: nn.Module, source: list[Any]) -> None:
        super().__init__()
        self.how, self.layer, self.source = how, layer, source
        self.level: Any = 1.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.calls += 1
        if not self.source:
            self.level = float(y.detach().mean())
            TABLES["level"] = self.level
        elif self.how == "attribute":
            y = y * self.source[0].level
        elif self.how == "global":
            y = y * TABLES.get("level", 1.0)
        elif self.how == "kept":
            self.kept = y.mean() + self.source[0].level
        return y


@pytest.mark.parametrize("how", ["attribute", "global", "kept", "none"])
def test_stages_that_pass_values_in_hidden_ways_are_found(how: str) -> None:
    torch.manual_seed(0)
    network = Passing(how).double()
    division = Division(network, ["keep"])
    reason = rehearse(division, network, torch.randn(4, 4, dtype=torch.float64))
    if how == "none":
        assert reason is None
    else:
        assert reason is not None
        assert "pass values to each other" in reason
        assert ("store another value in use.kept" in reason) == (how == "kept")
    assert float(network.keep.calls) == 0
    assert network.keep.level == 1.0
    assert TABLES == {}


def test_large_samples_are_compared_in_smaller_number() -> None:
    small, large = torch.zeros(REHEARSED, 3, 224, 224), torch.zeros(REHEARSED, 3, 512, 512)
    assert rehearsed(small) is small
    assert rehearsed(large).shape == (2, 3, 512, 512)
    assert [len(leaf) for leaf in rehearsed((small, large))] == [2, 2]


class Scaled(nn.Module):
    """A layer that scales its parameter in its first forward, so that its results have a variance of one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(1, dtype=torch.float64)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data.div_(x.std())
            self.ready = True
        return x * self.scale


def test_the_comparison_leaves_parameters_that_a_first_forward_sets() -> None:
    network = nn.Sequential(nn.Linear(4, 4), scaled := Scaled(), nn.Linear(4, 4)).double()
    assert rehearse(Division(network, ["1"]), network, torch.randn(4, 4, dtype=torch.float64)) is None
    assert float(scaled.scale) == 1.0
    assert not scaled.ready
