"""The order in which a backward gives leaves their gradients, and so calls the hooks of the leaves.

A user's hooks may draw random numbers, or count. For autograd a call of a divided network is one function, which
returns all gradients at once. Autograd would then call the hooks in the order of the function's arguments.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from cnnstrategies._torch_private import sequence_number


def ready_order(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int]:
    """Return the indices of leaves in the order in which a backward from the roots gives the leaves their gradients.

    The function imitates autograd's engine, which runs the node that was created last among the nodes that have all
    their gradients, and gives a leaf its gradient as soon as possible.

    Args:
        roots: Results of a forward.
        leaves: Leaves. Leaves that the roots do not depend on are left out.
    """
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    waits, seen, todo = Counter[Node](starts), set(starts), [*starts]
    while todo:
        for node in _following(todo.pop()):
            waits[node] += 1
            if node not in seen:
                seen.add(node)
                todo.append(node)
    index_of = {id(leaf): index for index, leaf in enumerate(leaves)}
    ready: list[tuple[int, int, Node]] = []
    order: list[int] = []
    number = 0  # Nodes of equal priority run in the order in which they become ready.

    def arrive(node: Node) -> None:
        nonlocal number
        waits[node] -= 1
        if not waits[node]:
            number += 1
            heapq.heappush(ready, (-sequence_number(node), number, node))

    for node in starts:
        arrive(node)
    while ready:
        node = heapq.heappop(ready)[2]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) in index_of:
            order.append(index_of[id(leaf)])
        for following in _following(node):
            arrive(following)
    return order


def in_order(parameters: Mapping[str, Tensor], order: Sequence[str]) -> dict[str, Tensor]:
    """Return arguments for an autograd function that make autograd call the parameters' hooks in an order.

    Autograd runs the node that was created last. Each parameter of the order therefore gets a node of its own.

    Args:
        parameters: The parameters, by name.
        order: Names of parameters. The hooks of the first one are called first.
    """
    with torch.enable_grad():
        views = {name: parameters[name].view_as(parameters[name]) for name in reversed(order) if name in parameters}
    return {name: views.get(name, parameter) for name, parameter in parameters.items()}


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]
