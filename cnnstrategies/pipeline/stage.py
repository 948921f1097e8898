"""Divide a traced network into stages. A stage has the parameters of its layers, with their names in the network."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from cnnstrategies._torch_private import compile_again_for_other_hooks
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.graph_checks import TracedModule
from cnnstrategies.pipeline.node_uses import (
    changed_in_place,
    ordered_nodes,
    origins,
    read_buffers,
    stages_of_readers,
    state_names,
)
from cnnstrategies.pipeline.tracing import find_cut, trace

IMAGES = "images"


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage, and the values that the stage receives and sends.

    A value that crosses a cut is the result of a node, and has the node's name. It is usually a tensor, but it can also
    be a tuple or a number. Each stage that uses the value receives it directly from the stage that computes it. The
    network's input has the name ``images`` and exists in stage 0.

    Attributes:
        graph: Graph that takes ``inputs`` and returns a tuple of ``outputs``; in the last stage it returns the
            network's result.
        inputs: Names of the values that the stage receives; ``images`` in stage 0.
        outputs: Names of the values that the stage sends.
        names_from: For each stage that sends values to this stage: the names of these values.
        names_to: For each stage that receives values from this stage: the names of these values.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    names_from: dict[int, list[str]]
    names_to: dict[int, list[str]]


@dataclass(frozen=True)
class Blueprint:
    """The division of a network into stages, for training and for evaluation.

    Attributes:
        network: The network.
        stages: Graphs of all stages for each mode. Keys are True for training and False for evaluation. Both modes have
            the same graphs unless the network's own code depends on the mode.
        state: For each stage, the names that its parameters and buffers have in the network.
        used: Names of the parameters and buffers that the network uses in training.
        constants: Tensors that the graphs read, and that are not attributes of the network, by their names.
    """

    network: nn.Module
    stages: dict[bool, tuple[StageGraph, ...]]
    state: tuple[tuple[str, ...], ...]
    used: frozenset[str]
    constants: Mapping[str, Tensor]

    def build(self, stage: int) -> "StageModule":
        """Return the module of one stage. The module shares its parameters and buffers with the network."""
        return StageModule(self, stage)


class StageModule(TracedModule):
    """A module that is one stage of a network.

    The module has only the stage's parameters and buffers, under the names that they have in the network.

    ``forward`` takes the values in `StageGraph.inputs` as arguments, and returns a tuple of the values in
    `StageGraph.outputs`; in the last stage it returns the network's result. It runs the graph of the module's current
    mode, training or evaluation.
    """

    def __init__(self, blueprint: Blueprint, stage: int) -> None:
        super().__init__()
        network = blueprint.network
        graphs = {training: stages[stage].graph for training, stages in blueprint.stages.items()}
        for graph in graphs.values():
            for node in graph.nodes:
                if node.op == "call_module":
                    put_module_at(self, str(node.target), network.get_submodule(str(node.target)))
        names = set(blueprint.state[stage])
        for graph in graphs.values():
            names |= {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        for name in sorted(names & blueprint.constants.keys()):
            self.register_buffer(name, blueprint.constants[name], persistent=False)
        present = {name for name, _ in (*self.named_parameters(), *self.named_buffers())}
        for name in sorted(names - present):
            _put_attribute(self, network, name)
        # torch.fx generates one `forward` for the training graph and one for the evaluation graph. Both read the layers
        # from `self`, so both modes use the same layers.
        self._run = {training: type(fx.GraphModule(self, graph)).forward for training, graph in graphs.items()}
        # The submodules are shared with the network and have its modes, so only the mode of this module is set.
        self.training = network.training

    def forward(self, *inputs: Any) -> Any:
        """Run the stage's graph on its inputs."""
        return self._run[self.training](self, *inputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs of both modes. The arguments are passed to ``torch.compile``.

        torch compiles a function for at most eight input shapes; for other shapes the function runs uncompiled.
        """
        compile_again_for_other_hooks()
        self._run = {mode: torch.compile(run, *args, **kwargs) for mode, run in self._run.items()}


def divide(network: nn.Module, cuts: Sequence[str | int]) -> Blueprint:
    """Divide a network into stages.

    Args:
        network: The whole network.
        cuts: For each cut, in the order of the network, the name of the module after which the network is cut, or the
            index of the first node after the cut. An index refers to the
            :func:`~cnnstrategies.pipeline.node_uses.ordered_nodes` of the graph for training, and must be one of this
            graph's :func:`~cnnstrategies.pipeline.tracing.cut_positions`.

    Raises:
        ConfigurationError: The network cannot be traced, or a cut is not possible.
    """
    stages = len(cuts) + 1
    training = trace(network, True)
    positions = check_cuts(training, cuts)
    evaluation = trace(network, False)
    stage_of: dict[fx.Node, int] = {}
    owner: dict[str, int] = {}
    for index, node in enumerate(ordered_nodes(training)):
        stage_of[node] = sum(cut <= index for cut in positions)
        owner |= dict.fromkeys(state_names(training, node), stage_of[node])
    owner |= stages_of_readers(training, stage_of)
    first = divide_graph(training, stage_of, stages)
    used = frozenset(owner)
    if training.code == evaluation.code:
        second = first
    else:
        second = divide_graph(evaluation, stages_by_state(evaluation, owner), stages)
    # Stage 0 also gets the parameters and buffers that no node uses, so that the stages together have all of them.
    names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
    constants = {**constants_of(training, network), **constants_of(evaluation, network)}
    state: list[list[str]] = [[] for _ in range(stages)]
    for name in names:
        state[owner.get(name, 0)].append(name)
    return Blueprint(network, {True: first, False: second}, tuple(map(tuple, state)), used, constants)


def check_cuts(traced: fx.GraphModule, cuts: Sequence[str | int]) -> list[int]:
    """Return the positions of cuts in a traced network; see :func:`divide`.

    Raises:
        ConfigurationError: A cut is not possible.
    """
    positions = [cut if isinstance(cut, int) else find_cut(traced, cut) for cut in cuts]
    if sorted(set(positions)) != positions:
        raise ConfigurationError(
            f"cuts={list(cuts)}: list each cut once, in the order in which the network runs the modules"
        )
    return positions


def constants_of(traced: fx.GraphModule, network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a traced network's graph reads and that are not attributes of the network."""
    names = {name for name, _ in network.named_buffers(recurse=False)}
    return {name: tensor for name, tensor in traced.named_buffers(recurse=False) if name not in names}


def stages_by_state(traced: fx.GraphModule, owner: dict[str, int]) -> dict[fx.Node, int]:
    """Return the stage of each node of the evaluation graph.

    A node with parameters or buffers belongs to the stage that owns them. Any other node belongs to the same stage as
    the node before it.

    Args:
        traced: The graph for evaluation.
        owner: Stage of each parameter and buffer, by name. This function adds the parameters and buffers that only the
            evaluation graph uses.

    Raises:
        ConfigurationError: A parameter or buffer would be needed in two stages.
    """
    stage_of = {}
    current = 0
    sent = read_buffers(traced)
    for node in ordered_nodes(traced):
        names = [name for name in state_names(traced, node) if name not in sent]
        owners = {owner[name] for name in names if name in owner}
        if owners and (len(owners) > 1 or min(owners) < current):
            raise _other_stage(names[0])
        current = max(owners, default=current)
        stage_of[node] = current
        owner |= dict.fromkeys(names, current)
    for name, stage in stages_of_readers(traced, stage_of).items():
        if owner.setdefault(name, stage) != stage:
            raise _other_stage(name)
    return stage_of


def _other_stage(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"in evaluation the network uses {name!r} in a different stage than in training: choose other cuts or fewer "
        "stages"
    )


def divide_graph(
    traced: fx.GraphModule,
    stage_of: Mapping[fx.Node, int],
    stages: int,
    changed: Mapping[int, Collection[fx.Node]] | None = None,
) -> tuple[StageGraph, ...]:
    """Divide a traced network's graph, and return one graph for each stage.

    Args:
        traced: The traced network.
        stage_of: Stage of each node that computes something.
        stages: Number of stages.
        changed: For each stage, nodes whose values the stage changes in place; by default the nodes that
            :func:`changed_values` finds.
    """
    changed = changed_values(traced, stage_of) if changed is None else changed
    placeholder = next(node for node in traced.graph.nodes if node.op == "placeholder")
    output = next(node for node in traced.graph.nodes if node.op == "output")
    owners = stages_of_readers(traced, stage_of)
    buffers = {node: owners[name] for name, node in read_buffers(traced).items() if name in owners}
    place = {placeholder: 0, **buffers, **stage_of, output: stages - 1}
    # Keys are the nodes in the order of computation. Values are the stages that must receive the node's result from the
    # stage that computes it.
    users = {node: {place[user] for user in node.users if user in place} - {place[node]} for node in place}
    return tuple(_stage_graph(place, users, stage, changed.get(stage, ())) for stage in range(stages))


def changed_values(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> dict[int, set[fx.Node]]:
    """Return, for each stage, the nodes whose values the stage's operations may change in place.

    Args:
        traced: The traced network.
        stage_of: Stage of each node that computes something.
    """
    changed: dict[int, set[fx.Node]] = {}
    for node, stage in stage_of.items():
        changed.setdefault(stage, set()).update(origins(traced, changed_in_place(traced, node)))
    return changed


def _stage_graph(
    place: dict[fx.Node, int], users: dict[fx.Node, set[int]], stage: int, changed: Collection[fx.Node]
) -> StageGraph:
    last = max(place.values())
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    by_name = {_name(node): node for node in place}
    received = [node for node in users if stage in users[node]]
    sent = [node for node in users if users[node] and place[node] == stage]
    inputs = tuple(map(_name, received)) if stage else (IMAGES,)
    outputs = tuple(map(_name, sent))
    stage_nodes = [node for node in place if place[node] == stage and node.op not in ("placeholder", "output")]
    for name, argument in [(name, graph.placeholder(name)) for name in inputs]:
        node = by_name[name]
        # Received tensors are autograd leaves, which cannot be changed in place. If the stage changes a received tensor
        # in place, the graph therefore copies the tensor first.
        copies[node] = graph.call_function(copy_value, (argument,)) if node in changed else argument

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in stage_nodes:
        copies[node] = graph.node_copy(node, copied)
    if stage == last:
        final = next(node for node in place if node.op == "output")
        graph.output(fx.node.map_arg(final.args[0], copied))
    else:
        graph.output(tuple(copies[node] for node in sent))
    graph.lint()
    sources = sorted({place[node] for node in received})
    targets = sorted({target for node in sent for target in users[node]})
    names_from = {source: [_name(node) for node in received if place[node] == source] for source in sources}
    names_to = {target: [_name(node) for node in sent if target in users[node]] for target in targets}
    return StageGraph(graph, inputs, outputs, names_from, names_to)


def check_backend(backend: str | None) -> None:
    """Refuse backends of ``torch.compile`` that do not work for stages.

    Raises:
        ConfigurationError: The backend is refused.
    """
    if backend == "cudagraphs":
        raise ConfigurationError(
            "compile_backend='cudagraphs': a run of a CUDA graph may overwrite the results of the previous run, but a "
            "stage must hold the results of several microbatches; use inductor, or strategy ddp"
        )


def copy_value(value: Any) -> Any:
    """Return a copy of nested containers in which all tensors are replaced by copies."""
    return tree_map(lambda leaf: torch.clone(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _name(node: fx.Node) -> str:
    return IMAGES if node.op == "placeholder" else node.name


def connections(graphs: Sequence[StageGraph]) -> list[tuple[int, int]]:
    """Return pairs of stages, the first of which sends its outputs to the second."""
    return [(source, target) for source, graph in enumerate(graphs) for target in graph.names_to]


def put_module_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module to a stage at a dotted path. Modules on the path that do not exist are created."""
    *parents, name = path.split(".")
    _submodule(root, parents).add_module(name, module)


def _put_attribute(root: nn.Module, network: nn.Module, path: str) -> None:
    """Give a stage the parameter, buffer or other attribute that the network has at a dotted path.

    The stage gets the same object, not a copy. A buffer stays persistent or non-persistent.
    """
    *parents, name = path.split(".")
    owner = network.get_submodule(".".join(parents))
    holder = _submodule(root, parents)
    value = getattr(owner, name)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        holder.register_buffer(name, value, persistent=path in network.state_dict(keep_vars=True))
    else:
        nn.Module.__setattr__(holder, name, value)


def _submodule(root: nn.Module, parents: Sequence[str]) -> nn.Module:
    """Return the submodule of a stage at a path. Modules on the path that do not exist are created.

    Args:
        root: The stage.
        parents: Names of the modules on the path, from the outermost to the innermost.
    """
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, TracedModule())
        root = getattr(root, name)
    return root
