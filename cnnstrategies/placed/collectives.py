"""Collectives of ``torch.distributed`` on tensors at places, in a group of one process.

Every rank runs the whole program, so a program that gathers or sums over processes must find one process, as on one
device. In such a group each result of a collective is an operand, which is copied by the rules.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import schema_of
from cnnstrategies.placed.messages import RefusedError

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places

# Collectives that leave their operands as they are in a group of one process. All others write their first argument,
# with tensors in nested lists, from their second argument.
IN_PLACE = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"}


def run_collective(places: "Places", func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective.

    Raises:
        RefusedError: The operands have places, and the group has several processes.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if all(places.place_of(tensor) is None for tensor in tensors):
        return func(*args, **kwargs)
    name: str = func.overloadpacket.__name__
    schema = schema_of(func)
    position = [argument.name for argument in schema.arguments].index("process_group")
    group = args[position] if position < len(args) else kwargs["process_group"]
    size = dist.ProcessGroup.unbox(group).size()
    if size > 1:
        placed = next(tensor for tensor in tensors if places.place_of(tensor) is not None)
        raise RefusedError(
            f"{name.strip('_')} of {places.describe([placed])} in a group of {size} processes: all ranks run the same "
            "program with the whole batch, so there is nothing to gather or to sum; leave the call out, or call it in "
            "a step of the module, where the group has one process"
        )
    if name not in IN_PLACE:
        with places.operations_again():
            for target, source in zip(tree_leaves(args[0]), tree_leaves(args[1]), strict=True):
                if target is not source:
                    target.copy_(source.reshape(target.shape))
    if not schema.returns:
        return None
    with places.local():
        # Groups of NCCL refuse tensors on the CPU.
        _, work = torch.ops.c10d.broadcast_.default([torch.zeros((), device=tensors[0].device)], group, 0, 0)
    return work if len(schema.returns) == 1 else (args[0], work)
