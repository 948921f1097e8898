"""Give the parameters and buffers of a module their places, and bring values back for checkpoints and at the end."""

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.dlpack import from_dlpack

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.network_copies import adopt_copies
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.optimizer_state import parameters_of
from cnnstrategies.placed.placing import place_tensors
from cnnstrategies.strategies.hybrid_pipeline.network import DividedForward, tensors_of
from cnnstrategies.strategies.hybrid_pipeline.own_stage import give_values, put_on_meta, stage_tensors
from cnnstrategies.strategies.without_ddp import check_optimizer_states

SMALL = 1 << 20  # Smaller numbers of bytes are not worth a file.

T = TypeVar("T")


class PlacedModule:
    """A module whose parameters and buffers have places.

    The parameters and buffers of the divided network are in their stages. All others are in the last stage, where the
    network's outputs are, so that the loss needs no messages. All ranks call each method.

    Args:
        module: The module.
        placed: The module's divided network.
        places: The rules of this rank.
        in_parts: Whether each rank has built its own stage only. The other stages' tensors, which rank 0 collects for a
            checkpoint, may then not fit into memory.
    """

    def __init__(self, module: LightningModule, placed: PlacedNetwork, places: Places, in_parts: bool = False) -> None:
        self.module, self.placed, self.places, self.in_parts = module, placed, places, in_parts
        self._last, self._replicas = placed.ranks[-1], placed.runner.replicas
        adopt_copies(module, placed, DividedForward)
        others = [(name, self._last, tensor) for name, tensor in tensors_of(module) if places.place_of(tensor) is None]
        place_tensors(places, module, others)
        self._outside = [tensor for _, _, tensor in others if isinstance(tensor, nn.Parameter)]

    def finish_gradients(self) -> None:
        """Give all replicas of a stage equal gradients of all parameters, after a step's last backward.

        Each replica of the last stage computes the gradients of parameters outside of the network from its own copy of
        the loss. On a GPU, the copies may differ in the last bit, and so would the replicas' parameters after a step.
        The first replica's gradients are therefore copied to the others.
        """
        self.places.sums.settle()
        if self.places.rank in self._last and len(self._last) > 1:
            gradients = [p.grad for p in self._outside if p.grad is not None and p.grad.layout is torch.strided]
            with self.places.local():
                self._replicas.copy_from_first(gradients)

    def state_on_rank_zero(self) -> dict[str, Any]:
        """Return the module's state dict. On rank 0 it has the values of all ranks."""
        return self.on_rank_zero(self.module.state_dict())

    def on_rank_zero(self, value: T) -> T:
        """Return nested containers, on rank 0 with the values of all ranks, for code that only rank 0 runs."""
        leaves = [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        by_owner: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            place = self.places.place_of(leaf)
            if place is not None and 0 not in place:
                by_owner.setdefault(place[0], []).append(index)
        for owner, indices in sorted(by_owner.items()):
            received = self._send_to_rank_zero([leaves[index] for index in indices], owner)
            if received is None:
                received = [self.places.foreign_like(leaves[index], (0,), "checkpoint") for index in indices]
            for index, leaf in zip(indices, received, strict=True):
                leaves[index] = leaf
        here = iter(leaves)
        result = tree_map(lambda leaf: next(here) if isinstance(leaf, Tensor) else leaf, value)
        return self._unmarked(result) if self.places.rank == 0 else result  # type: ignore[no-any-return]

    def optimizer_state_on_rank_zero(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict. On rank 0 it has the values of all ranks, and on other ranks no values."""
        packed = optimizer.state_dict()
        by_owner: dict[int, list[int]] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            place = self.places.place_of(parameter)
            by_owner.setdefault(0 if place is None or 0 in place else place[0], []).append(index)
        state: dict[int, Any] = {}
        for owner, indices in sorted(by_owner.items()):
            entries = {index: packed["state"][index] for index in indices if index in packed["state"]}
            state |= entries if owner == 0 else self._send_to_rank_zero(entries, owner) or {}
        if self.places.rank:
            return {**packed, "state": {}}
        ordered = {index: state[index] for index in sorted(state)}
        return {**packed, "state": self._unmarked(ordered)}

    def _send_to_rank_zero(self, value: T, owner: int) -> T | None:
        """Send a value from a rank to rank 0. All ranks must call this.

        Args:
            value: On the rank that sends, nested containers of tensors and plain values.
            owner: The rank that sends.

        Returns:
            On rank 0, the value, with tensors on the CPU; None on other ranks.
        """
        transport, content = self.placed.runner.transport, "the state of a stage"
        # The message, which names the user's line of code, shows at once if the ranks do not all save a checkpoint.
        subject = self.places.messages.subject("checkpoint")
        with self.places.local():
            if self.places.rank == owner:
                self.places.messages.send(0, subject, None)
                for transfer in transport.send_object(value, 0, content):
                    transfer.wait()
            elif self.places.rank == 0:
                self.places.messages.receive(owner, subject)
                received: T = transport.receive_object(owner, content, memory_on_disk if self.in_parts else None)
                return received
        return None

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load the whole states of optimizers. Each rank keeps the values of its own parameters.

        The optimizers give their states the places of the parameters; see :mod:`cnnstrategies.placed.hidden`. The
        states of foreign parameters are not moved to this rank's device.

        Raises:
            ConfigurationError: The checkpoint has another number of states.
        """
        check_optimizer_states(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            with self.places.local():
                optimizer.load_state_dict(self._own_part(optimizer, state))

    def _own_part(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state of an optimizer, with foreign tensors in the states of foreign parameters."""
        entries = dict(state["state"])
        indices = chain.from_iterable(group["params"] for group in state["param_groups"])
        for index, parameter in zip(indices, parameters_of(optimizer), strict=False):
            if isinstance(parameter, ForeignTensor) and index in entries:

                def foreign(leaf: Any, parameter: ForeignTensor = parameter) -> Any:
                    if not isinstance(leaf, Tensor):
                        return leaf
                    return self.places.foreign_like(leaf, parameter.place, "", parameter.device if leaf.dim() else None)

                entries[index] = tree_map(foreign, entries[index])
        return {**state, "state": entries}

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Bring the values of all parameters and buffers to all ranks, and the optimizers' states to rank 0.

        If each rank has built its own stage only, the stages' parameters and the optimizers' states stay where they
        are.
        """
        stay = self._leave_parts(optimizers) if self.in_parts else set()
        states = [] if self.in_parts else [self.optimizer_state_on_rank_zero(optimizer) for optimizer in optimizers]
        for _, tensor in list(tensors_of(self.module)):
            if id(tensor) in stay or self.places.place_of(tensor) is None:
                continue
            whole = self.places.everywhere(tensor.detach(), "the end")
            if isinstance(tensor, ForeignTensor):
                with self.places.local():
                    tensor.grad = None
                # The next run may make the tensor foreign, which needs memory that no other tensor uses. Attributes
                # that were computed after the last backward, such as pruned weights, have graphs.
                give_values(self.places, tensor, whole, is_used=True)
        for optimizer, state in zip(optimizers, states, strict=False):
            with self.places.local():
                if self.places.rank == 0:
                    optimizer.load_state_dict(state)
                else:
                    # Values of parameters that this rank has brought back may be out of date.
                    optimizer.state.clear()

    def _leave_parts(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Forget what is foreign of the stages. Return the ids of the stages' parameters, which stay where they are."""
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if isinstance(parameter, ForeignTensor):
                    optimizer.state.pop(parameter, None)
        division = self.placed.division
        tensors = stage_tensors(self.module, division.network, division)
        parameters = [tensor for *_, tensor in tensors if isinstance(tensor, nn.Parameter)]
        for parameter in parameters:
            if isinstance(parameter, ForeignTensor):
                parameter.grad = None
                put_on_meta(parameter)
        return {id(parameter) for parameter in parameters}

    def _unmarked(self, value: Any) -> Any:
        """Return tensors without places, for code that only this rank runs, such as the writing of a checkpoint.

        The tensors are copies. If the network may not fit into memory, they share the memory, as on one device.
        """

        def unmarked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # The result has a storage object of its own, and marks are attributes of storage objects.
            return from_dlpack(leaf.detach()) if self.in_parts else leaf.detach().clone()

        with self.places.local():
            return tree_map(unmarked, value)


def memory_on_disk(size: int) -> Tensor:
    """Return bytes of a temporary file, which the system writes to the disk and drops when memory is short.

    Args:
        size: Number of bytes.

    Returns:
        A tensor of the dtype uint8 (size,). A tensor with few bytes is in memory.

    Raises:
        ConfigurationError: The directory for temporary files does not have room for the bytes.
    """
    if size < SMALL:
        return torch.empty(size, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        try:
            # Without this call, the process would end at the first write that has no room.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ConfigurationError(
                f"{tempfile.gettempdir()} has no room for {size} bytes of another stage, which a checkpoint needs: "
                f"{error.strerror}; set TMPDIR to a directory on a larger disk"
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
