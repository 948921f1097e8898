"""Tests of tracing, which leaves no trace in a network, and of stages that call the user's own modules."""

import copy
import hashlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, ResNet

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.leaf_tracer import LeafTracer
from cnnstrategies.pipeline.open_tracer import OpenTracer
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, seals, trace_open
from tests.pipeline.stages_in_turn import train_in_stages
from tests.pipeline.test_stage import UNet, build
from tests.runner.ranks import run_apart

OUTSIDE: list[Any] = [0]


class Kinds(OrderedDict[str, type[nn.Module]]):
    """Classes of layers. Like transformers' table of activations, it makes a new layer whenever it is asked."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


KINDS = Kinds(tanh=nn.Tanh)


class Nasty(nn.Module):
    """A block whose forward does one thing that a trace must neither keep nor leave behind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("count", torch.zeros(()))
        self.unregistered = torch.zeros(4)
        self.calls, self.kept, self.history, self.recent, self.cache = 0, None, [1], deque([1], 2), {"a": 1}
        self.record = SimpleNamespace(calls=0)
        self.generator = torch.Generator()
        self.numbers = np.random.default_rng(0)
        if how == "hook's tensor":
            self.inner[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.unregistered = output

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        match self.how:
            case "counter":
                self.calls += 1
            case "stored":
                self.kept = y
            case "new attribute":
                self.penalty = y.square().mean()
            case "list":
                self.history.append(y)
            case "deque":
                self.recent.append(y)
            case "dictionary":
                self.cache["b"] = y
            case "object":
                self.record.calls += 1
            case "outside":
                OUTSIDE.append(y)
            case "child's attribute":
                self.inner[0].last = y
            case "buffer":
                self.count += 1
            case "buffer in place":
                self.count.add_(1)
            case "tensor":
                self.unregistered.add_(1)
            case "hook":
                self.inner.register_forward_hook(lambda module, inputs, output: None)
            case "hook's tensor":
                y = self.unregistered * 2
            case "generator":
                y = y * torch.rand(4, generator=self.generator)
            case "numpy generator":
                y = y * self.numbers.random()
            case "random":
                y = y * (1 + random.random())
            case "torch":
                y = y * torch.rand(4)
            case "value":
                y = y * 2 if y.sum() > 0 else y
            case "buffer's value":
                y = y * 2 if self.count > 3 else y
            case "autocast":
                with torch.autocast("cpu", enabled=False):
                    y = self.inner(y)
            case "no_grad":
                with torch.no_grad():
                    y = y + self.inner(x)
            case "checkpoint":
                y = checkpoint(self.inner, y, use_reentrant=False)
            case "constant in place":
                y = torch.zeros(4).double().add_(y.mean(0)) + y
            case "constant":
                y = y * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y


WHOLE = {
    "counter": "calls",
    "stored": "kept",
    "new attribute": "penalty",
    "list": "history",
    "deque": "recent",
    "dictionary": "cache",
    "object": "record",
    "outside": "outside of the network",
    "child's attribute": "last",
    "buffer": "count",
    "tensor": "unregistered",
    "hook": "_forward_hooks",
    "hook's tensor": "a hook on one of its submodules may have stored",
    "generator": "generator",
    "numpy generator": "numbers",
    "random": "with random",
    "torch": "with torch",
    "value": "branches on the value",
    "buffer's value": "branches on the value",
    "autocast": "torch.autocast",
    "no_grad": "torch.no_grad",
    "checkpoint": "torch.utils.checkpoint",
    "constant in place": "not a parameter or buffer",
}


def nasty(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Nasty(how), nn.Linear(4, 2)).double()


def digest(network: nn.Module) -> str:
    """Return a digest of everything in a network, and of the states of all generators of random numbers."""
    parts: list[str] = []
    seen: set[int] = set()

    def add(value: Any) -> None:
        parts.append(type(value).__qualname__)
        if isinstance(value, Tensor):
            content = hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
            parts.append(f"{id(value)} {value.requires_grad} {content}")
        elif isinstance(value, torch.Generator):
            parts.append(repr(value.get_state().tolist()))
        elif isinstance(value, np.random.Generator):
            parts.append(repr(value.bit_generator.state))
        elif isinstance(value, dict):
            for key, element in value.items():
                parts.append(repr(key))
                add(element)
        elif isinstance(value, list | tuple | deque | set):
            parts.append(str(len(value)))
            for element in value:
                add(element)
        elif isinstance(value, nn.Module | SimpleNamespace):
            add_object(value)
        else:
            parts.append(repr(value))

    def add_object(value: Any) -> None:
        parts.append(str(id(value)))
        if id(value) not in seen:
            seen.add(id(value))
            add(vars(value))

    add(network)
    parts += [repr(random.getstate()), repr(torch.get_rng_state().tolist()), repr(np.random.get_state())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@pytest.mark.parametrize("how", [*WHOLE, "buffer in place", "constant", "none"])
def test_a_trace_leaves_nothing_behind_and_what_a_graph_cannot_repeat_stays_whole(how: str) -> None:
    network = nasty(how)
    network[0].eval()
    before, outside = digest(network), list(OUTSIDE)
    assert digest(network) == before
    traced = trace_open(network)
    assert digest(network) == before
    assert outside == OUTSIDE
    assert list(KINDS.items()) == [("tanh", nn.Tanh)]
    reasons = [(network.get_submodule("1") is module, seal.reason) for module, seal in seals(traced).items()]
    if how in WHOLE:
        assert reasons[-1][0]
        assert WHOLE[how] in reasons[-1][1]
    else:
        assert reasons == []
    assert torch.equal(
        traced(torch.ones(2, 4, dtype=torch.float64)), network(torch.ones(2, 4, dtype=torch.float64))
    ) or how in ("random", "torch", "generator", "numpy generator", "buffer's value")


def compare(network: nn.Module, cuts: list[str | int], images: Tensor) -> Division:
    """Train a network in stages and a copy as a whole, and compare outputs, gradients and buffers."""
    whole = copy.deepcopy(network)
    parameters = list(network.parameters())
    division = Division(network, cuts)
    expected = whole(images)
    expected.square().sum().backward()
    torch.testing.assert_close(train_in_stages(division, images), expected, rtol=1e-12, atol=1e-12)
    assert all(now is then for now, then in zip(network.parameters(), parameters, strict=True))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(network.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(network.get_buffer(name), buffer)
    return division


def test_stages_of_the_users_own_modules_compute_what_the_network_computes() -> None:
    """A U-Net cut inside itself, and a ResNet cut inside its layers: one layer is opened, the others stay whole."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    compare(UNet().double(), ["down2", "up2"], images)
    network = ResNet(BasicBlock, [1, 2, 1, 1], num_classes=5)
    division = compare(network.double(), ["layer2.0", "layer3"], images)
    assert division.opened == ("", "layer2")
    calls = [str(node.target) for graph in division.graphs() for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        "layer1",
        "layer2.0",
        "layer2.1",
        "layer3",
        "layer4",
        "avgpool",
        "fc",
    ]
    assert division.owner["layer2.1.conv1.weight"] == 1
    assert division.owner["layer4.0.bn1.running_mean"] == 2


# The smallest networks of timm, which exist for tests such as these.
SMALL_TIMM = ["test_vit", "test_mambaout"]
OTHER_TIMM = [
    "test_byobnet",
    "test_convnext",
    "test_efficientnet",
    "test_nfnet",
    "test_resnet",
    "test_vit_relpos",
    "test_coatnet",
]


def try_published(names: list[str]) -> list[str]:
    """Trace networks in both modes, and divide them at three random positions; return what went wrong."""
    failures = []
    for name in names:
        network = build("timm", name).double()
        for layer in network.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        size = 160 if "vit" in name or "coat" in name else 64
        images = torch.randn(3, 3, size, size, dtype=torch.float64)
        before = digest(network)
        decide_by_shapes(network, lambda count, images=images: images[:count])
        positions = cut_positions(trace_open(network, True))
        trace_open(network, False)
        if digest(network) != before:
            failures.append(f"{name} is changed by a trace")
        random.seed(name)
        cuts: list[str | int] = sorted(random.sample(positions, 3))  # type: ignore[assignment]
        try:
            compare(network, cuts, images)
        except Exception as error:
            failures.append(f"{name} {cuts}: {type(error).__name__} {error}")
    return failures


@pytest.mark.cluster
@pytest.mark.parametrize("names", [SMALL_TIMM, OTHER_TIMM])
def test_published_networks_are_divided_and_left_as_they_are(names: list[str]) -> None:
    assert run_apart(try_published, names) == []


class Scaled(nn.Module):
    """A block of two layers, which returns its result in one of several forms."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.form, self.scale = form, 1.0

    def forward(self, x: Tensor) -> Any:
        return self.form(self.first(x) * self.scale, self.second(x))


class Net(nn.Module):
    """Two blocks. The network's own code uses a nested result of each block."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any], use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.use = Scaled(form), Scaled(form), use
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.use(self.a(x)) * (self.gain if self.training else 1.0)
        return self.use(self.b(x))


FORMS: list[tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda x, y: x + y, lambda z: z),
    (lambda x, y: [x, (y, 3)], lambda z: sum(element for element in (z[0], *z[1]))),  # type: ignore[arg-type, return-value]
    (lambda x, y: {"x": x, "y": None, "z": y}, lambda z: z["x"] + z["z"] if z["y"] is None else z["x"]),
    (lambda x, y: SimpleNamespace(x=x, y=y), lambda z: z.x * z.y),
]


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_modules_may_return_nested_results(number: int) -> None:
    torch.manual_seed(0)
    division = compare(Net(*FORMS[number]).double(), ["a"], torch.randn(2, 4, dtype=torch.float64))
    assert division.opened == (("", "a", "b") if number == 3 else ("",))


@dataclass
class Output(dict[str, Any]):
    """A result that is a dictionary and a dataclass, as the results of transformers' models are."""

    logits: Any
    features: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


register_pytree_node(
    Output,
    lambda output: ([*output.values()], [*output]),
    lambda parts, names: Output(**dict(zip(names, parts, strict=True))),
)


def test_a_result_that_is_a_dictionary_and_a_dataclass_keeps_its_class() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), Scaled(lambda x, y: Output(x * y)))
    images = torch.randn(2, 4)
    result = trace_open(network)(images)
    assert type(result) is Output
    assert result.features is None
    assert torch.equal(result.logits, network(images).logits)
    assert torch.equal(result["logits"], result.logits)


def test_attributes_hooks_and_modes_stay_live() -> None:
    torch.manual_seed(0)
    network = Net(*FORMS[0]).double()
    images = torch.randn(2, 4, dtype=torch.float64)
    division = Division(network, ["a.first"])
    assert division.opened == ("", "a")
    events: list[str] = []

    def check() -> None:
        torch.testing.assert_close(train_in_stages(division, images), network(images))

    check()
    network.b.scale = 3.0  # An attribute of a whole module.
    network.b.register_forward_hook(lambda *_: events.append("hook"))
    check()
    assert events == ["hook", "hook"]
    network.gain = 5.0  # An attribute that the opened network's code reads.
    check()
    network.a.scale = 0.5
    check()
    network.eval()
    check()
    network.train()
    network.gain, network.a.scale = 2.0, 1.0
    check()
    network.a.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"a \(Scaled\) has a hook that was registered after .* other cuts"):
        division.graphs()
    with pytest.raises(ConfigurationError, match=r"'a.first'.*it has hooks"):
        Division(network, ["a.first"])


class StartsInPlace(nn.Sequential):
    """A block that begins with an operation in place on its input."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(4, 4))


def test_a_whole_module_may_change_what_its_stage_receives_in_place() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), StartsInPlace(), nn.Linear(4, 2)).double()
    compare(network, ["0"], torch.randn(2, 4, dtype=torch.float64))


def test_cuts_inside_a_module_that_stays_whole_are_refused_with_the_reason() -> None:
    network = nasty("stored")
    with pytest.raises(ConfigurationError, match=r"'1.inner.0'.*its forward changes the attribute 'kept'"):
        Division(network, ["1.inner.0"])
    assert Division(network, ["1"]).opened == ("",)
    with pytest.raises(ConfigurationError, match=r"Nasty \(Nasty\) cannot be cut.*changes the attribute 'cache'; move"):
        Division(Nasty("dictionary"), ["inner.0"])
    with pytest.raises(ConfigurationError, match=r"Nasty cannot be cut.* changes a tensor in place .*new_zeros"):
        Division(Nasty("constant in place"), ["inner.0"])


@pytest.mark.parametrize(("how", "full_traces"), [("none", 1), ("value", 2), ("stored", 2)])
def test_a_division_traces_a_network_as_few_times_as_possible(
    how: str, full_traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once with all modules, once more if a module stays whole, however many do, and once with the opened modules."""
    tracers: list[type] = []
    original = LeafTracer.trace

    def trace(tracer: LeafTracer, root: nn.Module, *arguments: Any) -> Any:
        tracers.append(type(tracer))
        return original(tracer, root, *arguments)

    monkeypatch.setattr(LeafTracer, "trace", trace)
    Division(nn.Sequential(*(nasty(how) for _ in range(3))), ["0"])
    assert tracers == [LeafTracer] * full_traces + [OpenTracer]


class Precise(nn.Module):
    """A block, or a whole network, that computes its second layer without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            result: Tensor = self.second(x.float())
            return result


def test_a_block_that_leaves_autocast_stays_whole_and_computes_as_on_one_device() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), Precise(), nn.Linear(4, 2))
    whole, images = copy.deepcopy(network), torch.randn(2, 4)
    for cut in ("0", "1"):
        network.zero_grad()
        whole.zero_grad()
        division = Division(network, [cut])
        assert division.opened == ("",)
        with torch.autocast("cpu", torch.bfloat16):
            expected = whole(images)
            expected.square().sum().backward()
            assert torch.equal(train_in_stages(division, images), expected)
        pairs = zip(network.parameters(), whole.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)  # type: ignore[arg-type]
    reason = (
        r"'1.first', inside of 1 \(Precise\), which runs as a whole because its forward computes under torch.autocast"
    )
    with pytest.raises(ConfigurationError, match=reason):
        Division(network, ["1.first"])


def test_what_the_own_forward_calls_by_a_checkpoint_is_traced_as_if_called_without() -> None:
    network = Nasty("checkpoint").double()
    whole, images = copy.deepcopy(network), torch.randn(3, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="saves no memory in a pipeline.*activation_checkpointing"):
        division = Division(network, ["inner.0"])
    whole(images).square().sum().backward()
    assert torch.equal(train_in_stages(division, images), whole(images))
    for mine, theirs in zip(network.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


class Rotating(nn.Module):
    """A network that checks a buffer of a submodule, and uses the buffer in each of its layers, as with RoPE."""

    def __init__(self, is_changed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.table = nn.Module()
        self.table.register_buffer("angles", torch.randn(4), persistent=False)
        self.is_changed = is_changed

    def forward(self, x: Tensor) -> Tensor:
        assert self.table.angles.numel() == 4
        angles = self.table.angles
        for layer in self.layers:
            x = layer(x * angles).tanh()
            if self.is_changed:
                self.table.angles.mul_(0.9)
        return x


def test_a_buffer_that_is_only_read_goes_to_all_stages_that_use_it() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 4, dtype=torch.float64)
    division = compare(Rotating(False).double(), ["layers.0", "layers.2"], images)
    assert division.owner["table.angles"] == 0
    assert [graph.inputs for graph in division.graphs()][1:] == [
        ("table_angles", "layers_0"),
        ("table_angles", "layers_2"),
    ]
    with pytest.raises(ConfigurationError, match=r"cannot be cut after 'layers.0' .* uses the same parameters"):
        Division(Rotating(True), ["layers.0"])


class Sharing(nn.Module):
    """A network that calls a module which one of its blocks calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.block = Nasty("none")
        self.block.inner = self.shared
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.shared(self.shared(self.block(x)) + x))
        return result


def test_a_module_that_a_block_shares_with_the_network_keeps_both_whole() -> None:
    """Calls of a module are counted for each caller, so calls inside a whole block do not change the keys of others."""
    torch.manual_seed(0)
    assert compare(Sharing().double(), ["shared"], torch.randn(2, 4, dtype=torch.float64)).opened == ("",)


@pytest.mark.cluster
def test_stages_can_be_compiled_as_one_graph() -> None:
    def compiled() -> None:
        torch.manual_seed(0)
        network = build("torchvision", "resnet18").double()
        division = Division(network, ["layer2.0"])
        division.compile(fullgraph=True, backend="eager")
        images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        torch.testing.assert_close(train_in_stages(division, images), network(images))

    run_apart(compiled)
