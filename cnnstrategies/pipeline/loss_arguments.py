"""How a training step calls the loss that its module declares: which argument is what."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cnnstrategies.pipeline.watched import PLAIN


class UnknownArgumentError(Exception):
    """An argument of the loss is not known before the network's result is known. The message says which."""


class Output(NamedTuple):
    """A tensor of the network's result.

    Attributes:
        number: Index of the tensor in the result.
    """

    number: int


class InBatch(NamedTuple):
    """A tensor of the step's batch.

    Attributes:
        number: Index of the tensor among the leaves of the step's arguments.
    """

    number: int


class LossArguments(NamedTuple):
    """Arguments of the loss.

    Attributes:
        leaves: For each leaf in the arguments an `Output`, an `InBatch`, or a plain value, such as a number.
        tree: Structure of the positional arguments and the keyword arguments.
    """

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(cls, args: Any, kwargs: Any, outputs: Sequence[Tensor], batch: Sequence[Any], samples: int) -> Self:
        """Return how a step has called the loss.

        Args:
            args: Positional arguments of the loss.
            kwargs: Keyword arguments of the loss.
            outputs: Tensors of the network's result.
            batch: Leaves of the step's arguments.
            samples: Number of samples of the batch.

        Raises:
            UnknownArgumentError: A tensor is neither a tensor of the result nor one of the batch, or does not have one
                row for each sample.
        """
        known: dict[int, Output | InBatch] = {
            id(leaf): InBatch(index) for index, leaf in enumerate(batch) if isinstance(leaf, Tensor)
        }
        known |= {id(output): Output(index) for index, output in enumerate(outputs)}
        leaves, tree = tree_flatten((args, kwargs))
        names: list[Any] = []
        for leaf in leaves:
            name = known.get(id(leaf)) if isinstance(leaf, Tensor) else leaf
            if isinstance(leaf, Tensor) and name is None:
                raise UnknownArgumentError(
                    f"training_step gives loss() a tensor of shape {tuple(leaf.shape)} that it has computed itself: "
                    "give loss() the network's result and tensors of the batch, and compute the rest in loss()"
                )
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != samples):
                raise UnknownArgumentError(
                    f"training_step gives loss() a tensor of shape {tuple(leaf.shape)}, which does not have one row "
                    f"for each of {samples} samples"
                )
            if not isinstance(leaf, (Tensor, *PLAIN)):
                raise UnknownArgumentError(
                    f"training_step gives loss() an object of the class {type(leaf).__name__}: give it tensors and "
                    "numbers"
                )
            names.append(name)
        return cls(tuple(names), tree)

    @property
    def in_batch(self) -> list[int]:
        """Indices of the batch's tensors among the arguments."""
        return sorted({leaf.number for leaf in self.leaves if isinstance(leaf, InBatch)})

    def are_in(self, batch: Sequence[Any], samples: int) -> bool:
        """Whether a batch has all tensors that are arguments, with one row for each sample.

        Args:
            batch: Leaves of the step's arguments.
            samples: Number of samples of the batch.
        """
        leaves = [batch[index] if index < len(batch) else None for index in self.in_batch]
        return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples for leaf in leaves)

    def fill(
        self, outputs: Mapping[int, Any] | Sequence[Tensor], batch: Mapping[int, Tensor] | Sequence[Any]
    ) -> tuple[Any, Any]:
        """Return positional arguments and keyword arguments with other tensors.

        Args:
            outputs: Tensors of the network's result, by index.
            batch: Tensors of the batch, by index.
        """

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Output):
                return outputs[leaf.number]
            return batch[leaf.number] if isinstance(leaf, InBatch) else leaf

        args, kwargs = tree_unflatten([value(leaf) for leaf in self.leaves], self.tree)
        return args, kwargs

    def targets(self, batch: Mapping[int, Tensor]) -> Any:
        """Return the second argument of the loss, which must be tensors of the batch.

        Args:
            batch: Tensors of the batch, by index.
        """
        args, kwargs = self.fill({leaf.number: None for leaf in self.leaves if isinstance(leaf, Output)}, batch)
        return args[1] if len(args) > 1 else kwargs["targets"]
