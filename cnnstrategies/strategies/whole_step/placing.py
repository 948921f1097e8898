"""Give the parameters and buffers of a module their places, and bring values back for checkpoints and at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import swap_contents
from cnnstrategies.pipeline.network_copies import adopt_copies
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.optimizer_state import parameters_of
from cnnstrategies.placed.placing import place_tensors
from cnnstrategies.strategies.whole_step.network import DividedForward, tensors_of
from cnnstrategies.strategies.without_ddp import check_optimizer_states

T = TypeVar("T")


class PlacedModule:
    """A module whose parameters and buffers have places.

    The parameters and buffers of the divided network are in their stages. All others are in the last stage, where the
    network's outputs are, so that the loss needs no messages. All ranks call each method.

    Args:
        module: The module.
        placed: The module's divided network.
        places: The rules of this rank.
    """

    def __init__(self, module: LightningModule, placed: PlacedNetwork, places: Places) -> None:
        self.module, self.places = module, places
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
            gradients = [parameter.grad for parameter in self._outside if parameter.grad is not None]
            with self.places.local():
                self._replicas.copy_from_first(gradients)

    def state_on_rank_zero(self) -> dict[str, Any]:
        """Return the module's state dict. On rank 0 it has the values of all ranks."""
        return self.on_rank_zero(self.module.state_dict())

    def on_rank_zero(self, value: T) -> T:
        """Return nested containers, on rank 0 with the values of all ranks, for code that only rank 0 runs."""
        leaves = [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        brought = self.places.bring_all(leaves, (0,), "checkpoint")
        here = iter([brought.get(id(leaf), leaf) for leaf in leaves])
        result = tree_map(lambda leaf: next(here) if isinstance(leaf, Tensor) else leaf, value)
        return self._unmarked(result) if self.places.rank == 0 else result  # type: ignore[no-any-return]

    def optimizer_state_on_rank_zero(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict. On rank 0 it has the values of all ranks, and on other ranks no values."""
        packed = optimizer.state_dict()
        by_owner: dict[int, list[int]] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            place = self.places.place_of(parameter)
            by_owner.setdefault(0 if place is None else place[0], []).append(index)
        state: dict[int, Any] = {}
        with self.places.local():
            for owner, indices in sorted(by_owner.items()):
                entries = {index: packed["state"][index] for index in indices if index in packed["state"]}
                if owner == self.places.rank == 0:
                    state |= entries
                elif owner == self.places.rank:
                    self.places.messages.send(0, "optimizer", entries)
                elif self.places.rank == 0:
                    state |= self.places.messages.receive(owner, "optimizer")
        if self.places.rank:
            return {**packed, "state": {}}
        ordered = {index: state[index] for index in sorted(state)}
        return {**packed, "state": self._unmarked(ordered)}

    def load_optimizer_states(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load the whole states of optimizers. Each rank keeps the values of its own parameters.

        The optimizers give their states the places of the parameters; see :mod:`cnnstrategies.placed.hidden`.

        Raises:
            ConfigurationError: The checkpoint has another number of states.
        """
        check_optimizer_states(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            with self.places.local():
                optimizer.load_state_dict(dict(state))

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Bring the values of all parameters and buffers to all ranks, and the optimizers' states to rank 0."""
        states = [self.optimizer_state_on_rank_zero(optimizer) for optimizer in optimizers]
        for _, tensor in list(tensors_of(self.module)):
            if self.places.place_of(tensor) is None:
                continue
            whole = self.places.everywhere(tensor.detach(), "the end")
            if isinstance(tensor, ForeignTensor):
                with self.places.local():
                    tensor.grad = None
                    is_parameter = isinstance(tensor, nn.Parameter)
                    value = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
                    swap_contents(tensor, value)
        for optimizer, state in zip(optimizers, states, strict=True):
            with self.places.local():
                if self.places.rank == 0:
                    optimizer.load_state_dict(state)
                else:
                    # Values of parameters that this rank has brought back may be out of date.
                    optimizer.state.clear()

    def _unmarked(self, value: Any) -> Any:
        """Return copies of tensors, for code that only this rank runs, such as the writing of a checkpoint."""
        with self.places.local():
            return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)
