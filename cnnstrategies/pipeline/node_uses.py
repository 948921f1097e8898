"""Parameters, buffers and results of earlier nodes that the nodes of a traced network use and change."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter

from torch import Tensor, fx, nn

# Names of functions and methods whose result may share storage with their first argument, besides in-place ones.
_VIEWS = frozenset(
    {
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"),
        *("transpose", "swapaxes", "swapdims", "movedim", "permute", "t", "T", "mT", "rearrange", "diagonal"),
        *("expand", "expand_as", "broadcast_to", "narrow", "chunk", "split", "tensor_split", "unbind", "select"),
        *("unfold", "getitem", "getattr", "detach", "real", "imag", "view_as_real", "view_as_complex", "identity"),
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    }
)
# Layers of torch.nn without parameters whose result may share storage with their argument.
_VIEW_LAYERS = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
IN_PLACE_OPERATORS = frozenset({"iadd", "isub", "imul", "itruediv", "setitem"})


def ordered_nodes(traced: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that compute something, in topological order.

    The result contains all nodes except the inputs of the graph, nodes that read an attribute, and the output node.
    """
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def state_names(traced: fx.GraphModule, node: fx.Node, reads: bool = True) -> Iterator[str]:
    """Yield the names of the parameters and buffers that a node uses. The network's state dict has the same names.

    Args:
        traced: The traced network.
        node: The node.
        reads: Whether to yield the parameters and buffers that the network's own code reads, besides those of modules.
    """
    if node.op == "call_module":
        prefix = str(node.target)
        module = traced.get_submodule(prefix)
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            yield f"{prefix}.{name}"
    for source in node.all_input_nodes if reads else ():
        if source.op == "get_attr" and isinstance(attrgetter(str(source.target))(traced), Tensor):
            yield str(source.target)


def uses_of_state(traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[int, list[int]]:
    """Return, for each parameter and buffer that belongs to one stage, the indices of the nodes that use it.

    Keys are the ids of the parameters and buffers. Indices refer to ``nodes``.
    """
    sent = read_buffers(traced)
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in state_names(traced, node):
            if name in sent:
                continue
            uses.setdefault(id(attrgetter(name)(traced)), []).append(index)
    return uses


def read_buffers(traced: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the buffers that the network's own code reads and no code changes, such as a table of rotary embeddings.

    A cut may separate nodes that use such a buffer. The stage of the first of these nodes owns the buffer, and sends it
    to the other stages like the result of a node.

    Returns:
        For each buffer, by name, the node of the graph that reads it.
    """
    nodes = ordered_nodes(traced)
    readers: dict[str, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).append(node)
    changed = {origin for node in nodes for origin in origins(traced, changed_in_place(traced, node))}
    of_modules = {name for node in nodes if node.op == "call_module" for name in state_names(traced, node, reads=False)}
    return {
        name: reader[0]
        for name, reader in readers.items()
        if len(reader) == 1
        and name not in of_modules
        and reader[0] not in changed
        and isinstance(tensor := attrgetter(name)(traced), Tensor)
        and not isinstance(tensor, nn.Parameter)
    }


def stages_of_readers(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> dict[str, int]:
    """Return the stage that owns each buffer of :func:`read_buffers`: the first stage that uses it.

    Args:
        traced: The traced network.
        stage_of: Stage of each node that computes something.
    """
    stages = {
        name: [stage_of[user] for user in node.users if user in stage_of] for name, node in read_buffers(traced).items()
    }
    return {name: min(of_users) for name, of_users in stages.items() if of_users}


def nodes_that_change(traced: fx.GraphModule, names: Collection[str]) -> Iterator[fx.Node]:
    """Yield the nodes that change in place a tensor which the graph reads as an attribute with one of some names."""
    for node in ordered_nodes(traced) if names else ():
        if any(
            origin.op == "get_attr" and origin.target in names
            for origin in origins(traced, changed_in_place(traced, node))
        ):
            yield node


def changed_in_place(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node whose result ``node`` changes in place. Return None if ``node`` changes nothing in place."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        in_place = bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = (
            bool(node.kwargs.get("inplace", False))
            or name.strip("_") in IN_PLACE_OPERATORS
            or (name.endswith("_") and not name.endswith("__"))
        )
    return first if in_place else None


def changes_of_shared_values(traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of nodes that a cut must not separate, because the second changes the first in place.

    The pairs are those in which a node after both uses the result of the first, or a view of it. A stage changes only
    its own copy of a value that it receives, so this node would find the value from before the change.

    Args:
        traced: The traced network.
        nodes: Result of :func:`ordered_nodes`.
    """
    position = {node: index for index, node in enumerate(nodes)}
    roots: dict[fx.Node, fx.Node] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        first = node.args[0] if node.args else None
        is_shared = isinstance(first, fx.Node) and _may_share(traced, node)
        root = roots.get(first, first) if is_shared else node  # type: ignore[arg-type]
        assert root is not None
        roots[node] = root
        sharing.setdefault(root, []).append(node)
        changed = changed_in_place(traced, node)
        if changed is None:
            continue
        before = [other for other in (root, *sharing[root]) if position.get(other, len(nodes)) < position[node]]
        used = [other for other in before if any(position.get(u, len(nodes)) > position[node] for u in other.users)]
        if used:
            yield min(position[other] for other in used), position[node]


def _may_share(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the result of a node may share storage with the node's first argument."""
    if changed_in_place(traced, node) is not None:
        return True
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        is_layer = type(module).__module__.startswith("torch.nn")
        return isinstance(module, _VIEW_LAYERS) if is_layer else not any(True for _ in module.parameters())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _VIEWS


def origins(traced: fx.GraphModule, node: fx.Node | None) -> Iterator[fx.Node]:
    """Yield a node, and then the earlier nodes whose results may share storage with the node's result.

    The result of a node may be a view of the node's first argument. The search therefore continues with the first
    argument of each node. It ends at a module with parameters, because such a module returns a new tensor.
    """
    while node is not None:
        yield node
        if node.op == "call_module" and any(True for _ in traced.get_submodule(str(node.target)).parameters()):
            return
        first = node.args[0] if node.args else None
        node = first if isinstance(first, fx.Node) else None
