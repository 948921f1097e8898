"""Keep the profile of a network in a file, for the next start of the same run on the same machine."""

import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value
from cnnstrategies.runtime.whole_file import whole_file

NAME = "pipeline_profile.json"
_PLAIN = (bool, int, float, str, tuple, type(None))


def key_of(traced: fx.GraphModule, images: Any, size: int, device: torch.device, *settings: Any) -> str:
    """Return a key that changes if the costs of a network may have changed.

    The key covers the traced graph, the modules that it calls with their settings, their code, and the shapes of their
    tensors, the shapes of the images, the device, the number of threads, and the versions of torch and of this package.

    Args:
        traced: The traced network.
        images: Inputs of the network.
        size: Number of samples that one device has in a step.
        device: Device on which the network is measured.
        settings: Whatever else changes the costs, such as the precision.
    """
    parts = [
        version("cnnstrategies"),
        torch.__version__,
        _name_of(device),
        torch.get_num_threads(),
        size,
        settings,
        [_form(image) for image in tree_leaves(images)],
        *_parts_of(traced),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _name_of(device: torch.device) -> str:
    """Return the name of a device's model."""
    if device.type != "cpu":
        module = torch.get_device_module(device.type)
        return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    model = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{platform.machine()} {model} {torch.backends.cpu.get_cpu_capability()}"


def _parts_of(traced: fx.GraphModule) -> Iterator[Any]:
    """Yield a description of each node, of each module that a node calls, and of each tensor."""
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    for node in traced.graph.nodes:
        target = node.target
        if callable(target):
            target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target))}"
        yield node.name, node.op, target, _text(node.args), _text(node.kwargs)
    for path in sorted(called):
        for name, module in traced.get_submodule(path).named_modules():
            plain = {
                attribute: value
                for attribute, value in sorted(vars(module).items())
                if isinstance(value, _PLAIN) and attribute[0] != "_" and attribute != "training"
            }
            code = getattr(type(module).forward, "__code__", None)
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            yield path, name, kind, plain, None if code is None else list(_code(code))
    tensors: tuple[tuple[str, Tensor], ...] = (*traced.named_parameters(), *traced.named_buffers())
    for name, tensor in tensors:
        yield name, _form(tensor), tensor.requires_grad


def _text(value: Any) -> str:
    """Return the arguments of a node as text, without addresses of objects."""
    return repr(fx.node.map_aggregate(value, lambda leaf: leaf.name if isinstance(leaf, fx.Node) else leaf))


def _code(code: CodeType) -> Iterator[Any]:
    yield code.co_code.hex(), code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _form(tensor: Any) -> Any:
    return (tuple(tensor.shape), str(tensor.dtype), tensor.layout) if isinstance(tensor, Tensor) else type(tensor)


def keep(file: Path, key: str, profile: Profile) -> None:
    """Write a profile to a file. Nothing is written if the disk does not allow it, because the file is not needed."""
    content = json.dumps({"key": key, "profile": asdict(profile)})
    with suppress(ConfigurationError, OSError), whole_file(file, "") as opened:
        opened.write(content.encode())


def kept(file: Path, key: str) -> Profile | None:
    """Return the profile that a file has for a key; None if the file is missing, is invalid or has another key."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        return _profile(**content["profile"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _profile(costs: dict[str, Any], fixed: Any, batch_norm: bool, nodes_have_names: bool) -> Profile:
    nodes = tuple(NodeCost(**node) for node in costs.pop("nodes"))
    values = tuple(Value(**{**value, "consumers": tuple(value["consumers"])}) for value in costs.pop("values"))
    cuts = tuple(costs.pop("cut_positions"))
    graph = GraphCosts(nodes, values, cuts, **costs)
    times = tuple((float(forward), float(backward)) for forward, backward in fixed)
    measured = [number for node in nodes for number in (node.forward, node.backward)]
    numbers = [*measured, *(number for pair in times for number in pair)]
    if not all(isfinite(number) and number >= 0 for number in numbers) or len(times) not in (0, len(nodes)):
        raise ValueError("the times are not those of the nodes")
    indices = [index for value in values for index in (value.producer, *value.consumers)]
    if not all(0 <= index < len(nodes) for index in (*indices, *cuts)):
        raise ValueError("a node is missing")
    return Profile(graph, times, bool(batch_norm), bool(nodes_have_names))
