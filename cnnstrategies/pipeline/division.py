"""Divide a network into stages that call the user's own modules, in the user's own tree of modules."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from cnnstrategies._torch_private import compile_again_for_other_hooks, has_hooks
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.graph_checks import graph_module, known
from cnnstrategies.pipeline.leaf_tracer import CallKey, call_keys
from cnnstrategies.pipeline.node_uses import ordered_nodes, stages_of_readers, state_names
from cnnstrategies.pipeline.noted_contents import NotedContents
from cnnstrategies.pipeline.open_tracer import TAKEN, Attribute, fingerprint
from cnnstrategies.pipeline.outside_reads import outside_reads
from cnnstrategies.pipeline.own_code import contexts_left, with_stores
from cnnstrategies.pipeline.stage import (
    StageGraph,
    changed_values,
    check_cuts,
    constants_of,
    divide_graph,
    stages_by_state,
)
from cnnstrategies.pipeline.tracing import mode, module_paths, seals, trace_open, trace_opened, unfoldable

_KEPT = 8  # Number of traces that are kept. A trace takes a fraction of a second.


@dataclass(frozen=True)
class _Trace:
    """The stages' graphs for one state of the opened containers.

    Attributes:
        state: Attributes of modules whose values the graphs contain, with these values; see `fingerprint`.
        outside: Functions that return other values which the graphs contain, with these values; see `outside_reads`.
        graphs: Graphs of all stages.
        traced: The traced network before its division.
        runs: For each stage, the function that runs its graph. The first argument is ``root``.
        root: The network, or an object with the attributes of the network and the constants of the graphs.
    """

    state: Mapping[Attribute, Any]
    outside: Sequence[tuple[Callable[[], Any], Any]]
    traced: fx.GraphModule
    graphs: tuple[StageGraph, ...]
    runs: tuple[Callable[..., Any], ...]
    root: Any

    @property
    def holds(self) -> bool:
        """Whether everything that the graphs contain is still as it was during the trace."""
        return all(
            fingerprint(getattr(module, name, None)) == value for (module, name), value in self.state.items()
        ) and all(fingerprint(read()) == value for read, value in self.outside)


class Division:
    """The division of a network into stages that call the network's own modules.

    A cut usually passes through few containers, for example through a ResNet and one of its four layers. Only the code
    of these containers, which are opened, runs as a graph. All other modules are called as they are, so that their
    hooks run and their attributes may change at any time. If an attribute changes that the code of an opened container
    reads, such as ``training``, the containers are traced again. All ranks trace the whole network and get equal
    graphs.

    Args:
        network: The network. It must have its parameters, but it may be on the meta device.
        cuts: For each cut, the name of the module after which the network is cut, or the index of the first node after
            the cut; see :func:`~cnnstrategies.pipeline.stage.divide`.
        traced: The network's graph for training, see :func:`.tracing.trace_open`; None to trace the network.

    Attributes:
        network: The network.
        stages: Number of stages.
        cuts: Index of the first node of each stage except the first, in the graph for training.
        opened: Names of the opened containers. The network itself has the name "".
        owner: Stage of each parameter and buffer, by name. Parameters and buffers that training does not use belong to
            the stage of their module, or else to the last stage, where the network's outputs are.
        used: Names of the parameters and buffers that the network uses in training, or that belong to modules that it
            uses.

    Raises:
        ConfigurationError: The network cannot be traced, or a cut is not possible.
    """

    def __init__(self, network: nn.Module, cuts: Sequence[str | int], traced: fx.GraphModule | None = None) -> None:
        self.network = network
        self.stages = len(cuts) + 1
        full = traced or trace_open(network, True)
        self.cuts = positions = tuple(check_cuts(full, cuts))
        stage_of = {node: sum(cut <= index for cut in positions) for index, node in enumerate(ordered_nodes(full))}
        self._modules = dict(network.named_modules())
        self.opened = self._cut_through(full, stage_of)
        with mode(network, True):
            first, place = self._trace(full, stage_of)
        self._traces = [first]
        self._tables: NotedContents | None = None  # Those of the parameters and submodules of all modules.
        self._parameters: list[tuple[str, int, nn.Parameter]] = []
        self._first = [(node.name, stage) for node, stage in place.items()]
        self.owner, self.used = self._owners(first.traced, place)
        self._compile: Callable[[Any], Any] = lambda run: run

    def graphs(self) -> tuple[StageGraph, ...]:
        """Return the graphs of all stages for the current state of the opened containers."""
        return self._current().graphs

    def run(self, stage: int, *inputs: Any) -> Any:
        """Run a stage.

        Args:
            stage: The stage.
            inputs: The values in `StageGraph.inputs` of the stage's graph.

        Returns:
            A tuple of the values in `StageGraph.outputs`; in the last stage, the network's result.

        Raises:
            ConfigurationError: An opened container has hooks.
        """
        trace = self._current()
        with contexts_left():
            return trace.runs[stage](trace.root, *inputs)

    def compile(self, **options: Any) -> None:
        """Compile the stages. The arguments are passed to ``torch.compile``."""
        compile_again_for_other_hooks()
        self._compile = lambda run: torch.compile(run, **options)
        self._traces = [replace(trace, runs=tuple(map(self._compile, trace.runs))) for trace in self._traces]

    def for_copy(self, network: nn.Module) -> "Division":
        """Return the division of a copy of the network into the same stages."""
        if self.network in known:
            known[network] = known[self.network]  # Numbers that follow from the shapes of images.
        division = copy.copy(self)
        vars(division).update(network=network, _modules=dict(network.named_modules()), _traces=[], _tables=None)
        return division

    def tensors(self, network: nn.Module | None = None) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the name, the stage and the tensor of each parameter and buffer, each tensor once.

        A parameter or buffer that was created after the division, such as ``weight_orig`` and ``weight_mask`` by
        `torch.nn.utils.prune`, belongs to the stage of its module.

        Args:
            network: A copy of the network, such as a teacher's; by default the network itself.
        """
        network = self.network if network is None else network
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name not in self.owner:
                self._add(name)
            yield name, self.owner[name], tensor

    def parameters(self) -> list[tuple[str, int, nn.Parameter]]:
        """Return the name, the stage and the tensor of each parameter, each tensor once.

        Tensors that stand in the places of parameters, as during `torch.func.functional_call`, are left out. The list
        is the same object as long as no parameter has been replaced.
        """
        if self._tables is None or not self._tables.hold:
            modules = [vars(module) for module in self.network.modules()]
            self._tables = NotedContents([module[key] for module in modules for key in ("_parameters", "_modules")])
            self._parameters = [
                (name, stage, tensor) for name, stage, tensor in self.tensors() if isinstance(tensor, nn.Parameter)
            ]
        return self._parameters

    def _add(self, name: str) -> None:
        """Add a parameter or buffer that was created after the division."""
        path = name.rpartition(".")[0]
        while True:
            prefix = f"{path}." if path else ""
            neighbours = [other for other in self.owner if other.startswith(prefix)]
            if neighbours or not path:
                break
            path = path.rpartition(".")[0]
        self.owner[name] = self.owner[neighbours[0]] if neighbours else 0
        if not self.used.isdisjoint(neighbours):
            self.used |= {name}

    def _current(self) -> _Trace:
        """Return the trace for the current state of the opened containers. Trace them if no trace has this state."""
        for path in self.opened:
            if path and has_hooks(self._modules[path]):
                raise ConfigurationError(
                    f"{path} ({type(self._modules[path]).__name__}) has a hook that was registered after the network "
                    "was divided, and a cut passes through this module: register the hook in __init__, so that the "
                    "network is not cut there, or choose other cuts"
                )
        for trace in self._traces:
            if trace.holds:
                return trace
        trace, _ = self._trace(trace_open(self.network), None)
        trace = replace(trace, runs=tuple(map(self._compile, trace.runs)))
        self._traces = [trace, *self._traces[: _KEPT - 1]]
        return trace

    def _cut_through(self, full: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> tuple[str, ...]:
        """Return the names of the containers of which one call has nodes in several stages."""
        spans: dict[CallKey, set[int]] = {}
        paths: dict[CallKey, str] = {}
        for node, stage in stage_of.items():
            calls = (node.meta.get("nn_module_stack") or {}).values()
            for key, (path, _) in zip(call_keys(node), calls, strict=True):
                spans.setdefault(key, set()).add(stage)
                paths[key] = str(path)
        opened = {"", *(paths[key] for key, stages in spans.items() if len(stages) > 1)}
        opened |= {path for path, module in self._modules.items() if module in unfoldable(full)}
        return tuple(path for path in self._modules if path in opened)

    def _trace(self, full: fx.GraphModule, stage_of: Mapping[fx.Node, int] | None) -> tuple[_Trace, dict[fx.Node, int]]:
        """Trace the opened containers in their current state, and divide the graph.

        Args:
            full: The network, traced in its current state.
            stage_of: Stage of each node of ``full``; None if the stages follow from the parameters' owners.

        Returns:
            The trace, and the stage of each node of its graph.

        Raises:
            ConfigurationError: The network's own code changes something besides attributes, or uses the value of an
                attribute before it assigns another one, which a graph does not do.
        """
        _check_root(self.network, full)
        try:
            traced, reads = trace_opened(self.network, full, {self._modules[path] for path in self.opened})
            coarse = match(full, traced)
        except ConfigurationError:
            coarse = None
        if coarse is None:
            # The code of an opened container cannot work with the result of a whole module. The graph then has all
            # nodes of the full one.
            self.opened = self._all_traced(full)
            traced, reads = trace_opened(self.network, full, {self._modules[path] for path in self.opened})
            coarse = match(full, traced)
            assert coarse is not None, f"two traces of {type(self.network).__name__} differ"
        _check_root(self.network, traced)
        state = {(module, name): fingerprint(getattr(module, name, None)) for module, name in reads}
        with_stores(traced.graph, self.network)
        if stage_of is not None:
            place = _stages(traced, {coarse[node]: stage for node, stage in stage_of.items()})
        elif [node.name for node in ordered_nodes(traced)] == [name for name, _ in self._first]:
            place = dict(zip(ordered_nodes(traced), (stage for _, stage in self._first), strict=True))
        else:
            place = stages_by_state(traced, dict(self.owner))
        full_place = {node: place[coarse[node]] for node in ordered_nodes(full)}
        changed = {
            stage: {coarse[node] for node in nodes if node in coarse}
            for stage, nodes in changed_values(full, full_place).items()
        }
        graphs = divide_graph(traced, place, self.stages, changed)
        constants = constants_of(traced, self.network)
        runs = tuple(type(graph_module(self.network, graph.graph, constants, "Stage")).forward for graph in graphs)
        root = _WithConstants(self.network, constants) if constants else self.network
        opened = [self._modules[path] for path in self.opened]
        outside = [(read, fingerprint(read())) for read in outside_reads(opened)]
        return _Trace(state, outside, traced, graphs, runs, root), place

    def _all_traced(self, full: fx.GraphModule) -> tuple[str, ...]:
        """Return the names of all containers that the full trace has traced into."""
        leaves = {str(node.target) for node in full.graph.nodes if node.op == "call_module"}
        inside = {path for node in full.graph.nodes for path in module_paths(node)} - leaves
        return tuple(path for path in self._modules if not path or path in inside)

    def _owners(self, traced: fx.GraphModule, place: Mapping[fx.Node, int]) -> tuple[dict[str, int], frozenset[str]]:
        """Return the stage of each parameter and buffer, and the names of those that the network uses in training.

        Raises:
            ConfigurationError: Two stages need the same parameter or buffer.
        """
        sent = stages_of_readers(traced, place)
        stages = {id(attrgetter(name)(traced)): stage for name, stage in sent.items()}
        for node, stage in place.items():
            for name in state_names(traced, node):
                if name not in sent and stages.setdefault(id(attrgetter(name)(traced)), stage) != stage:
                    raise ConfigurationError(
                        f"{name} belongs to modules of two stages: choose other cuts or fewer stages"
                    )
        network = self.network
        tensors: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
        tensors |= network.named_buffers(remove_duplicate=False)
        owner = {name: stages.get(id(tensor), self.stages - 1) for name, tensor in tensors.items()}
        return owner, frozenset(name for name, tensor in tensors.items() if id(tensor) in stages)


def _check_root(network: nn.Module, traced: fx.GraphModule) -> None:
    """Refuse a network whose own code does what a graph does not do."""
    if (seal := seals(traced).get(network)) is not None:
        raise ConfigurationError(
            f"{seal.place} cannot be cut into stages: {seal.reason}; move this code into a submodule, which runs as a "
            "whole"
        )


class _WithConstants:
    """A network together with the tensors that its graphs read and that are not its attributes."""

    def __init__(self, network: nn.Module, constants: Mapping[str, Tensor]) -> None:
        vars(self).update(constants)
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def match(full: fx.GraphModule, coarse: fx.GraphModule) -> dict[fx.Node, fx.Node] | None:
    """Return, for each node of a full graph, the node of a coarse graph that computes the node's value.

    In the coarse graph one node stands for all nodes of a module that is not opened. Both graphs come from the same
    code and therefore have their nodes in the same order.

    Args:
        full: The network, traced into all its modules.
        coarse: The network, traced into its opened containers.

    Returns:
        The nodes of the coarse graph by the nodes of the full graph; None if the graphs do not match.
    """
    matched = dict(zip(_inputs(full), _inputs(coarse), strict=True))
    nodes = [node for node in ordered_nodes(coarse) if TAKEN not in node.meta]
    calls = {call_keys(node)[-1]: node for node in nodes if node.op == "call_module"}
    others = iter(node for node in nodes if node.op != "call_module")
    for node in ordered_nodes(full):
        counterpart = next((calls[key] for key in call_keys(node) if key in calls), None)
        if counterpart is None:
            counterpart = next(others, None)
            if counterpart is None or (counterpart.op, counterpart.target) != (node.op, node.target):
                return None
        matched[node] = counterpart
    return matched if next(others, None) is None else None


def _inputs(traced: fx.GraphModule) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.op == "placeholder"]


def _stages(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the stage of each node of a coarse graph, from the stages of the nodes that the full graph has as well.

    Other nodes are elements of nested results, which belong to the stage of the module's call, and calls of modules
    that compute nothing, which belong to the stage of the node before.
    """
    place: dict[fx.Node, int] = {}
    current = 0
    for node in ordered_nodes(traced):
        if TAKEN in node.meta:
            place[node] = place[node.all_input_nodes[0]]
        else:
            place[node] = current = stage_of.get(node, current)
    return place
