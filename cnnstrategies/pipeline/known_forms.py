"""Knowledge of all ranks about the calls of a divided network with batches of one form.

The ranks exchange what they know about their stages in the first call with a form of batch, and remember it. In later
calls no rank waits for another rank's forward just to learn the shapes of the outputs.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cnnstrategies._torch_private import without_functions
from cnnstrategies.pipeline.tensor_headers import TensorHeader, TensorSpec
from cnnstrategies.placed.messages import RefusedError


class ForwardReport(NamedTuple):
    """A rank's report after its forwards of a call.

    Attributes:
        header: Header of the network's result for the whole batch; None if the rank has not computed a part of it.
        drawn: Names of the generators from which the rank's microbatches have drawn; see `Draws`.
        order: Names of the rank's parameters in the order in which a backward gives them their gradients. Empty if the
            rank has not run a microbatch.
    """

    header: TensorHeader | None
    drawn: Sequence[str]
    order: Sequence[str]


class BackwardReport(NamedTuple):
    """A rank's report after its backwards of a call.

    Attributes:
        used: Names of the parameters, and indices of the images' tensors, that have a gradient on the rank.
        drawn: As in :class:`ForwardReport`.
        stores: Whether hooks have stored values in the rank's backwards.
        drawn_backward: Names of the generators from which the rank's backwards have drawn.
        adds_to_grad: See `WholeBatch.adds_to_grad`.
    """

    used: Sequence[int | str]
    drawn: Sequence[str]
    stores: bool
    drawn_backward: Sequence[str]
    adds_to_grad: bool


class Used(NamedTuple):
    """Keys of the tensors to which a backward gives a gradient, as in :class:`BackwardReport`.

    Attributes:
        of_rank: Keys of this rank.
        of_all: Keys of all ranks.
    """

    of_rank: set[int | str]
    of_all: set[int | str]


@dataclass
class KnownForm:
    """Knowledge of all ranks about the calls with batches of one form.

    Attributes:
        header: Header of the network's result for the whole batch.
        drawn: Names of the generators from which a stage has drawn.
        used: What a backward gives a gradient to. The key says, for each output, whether the output had a gradient.
        newest: The last entry of ``used`` that was made or read; None before the first one.
        order: Names of all parameters in the order in which a backward gives them their gradients on one device.
        draws_backward: Whether backwards have drawn random numbers; None before the first one.
        adds_to_grad: Whether a stage's own code has added to ``grad`` of parameters in backwards.
    """

    header: TensorHeader
    drawn: set[str] = field(default_factory=set)
    order: Sequence[str] = ()
    draws_backward: bool | None = None
    adds_to_grad: bool = False
    used: dict[tuple[bool, ...], Used] = field(default_factory=dict)
    newest: Used | None = None

    def learn_forward(
        self, header: TensorHeader, reports: Sequence[ForwardReport], ranks: Sequence[Sequence[int]]
    ) -> None:
        """Remember the header of the network's result, and all ranks' reports after their forwards.

        Args:
            header: The header.
            reports: Reports of all ranks.
            ranks: For each stage, the ranks of its replicas.
        """
        self.header = header
        orders = [next((reports[rank].order for rank in stage if reports[rank].order), ()) for stage in ranks]
        self.order = [name for order in reversed(orders) for name in order]
        self.drawn |= {name for report in reports for name in report.drawn}

    def learn_backward(self, outputs: tuple[bool, ...], reports: Sequence[BackwardReport], rank: int) -> set[int | str]:
        """Remember all ranks' reports after their backwards. Return the keys of all tensors with a gradient.

        Args:
            outputs: For each output, whether it had a gradient.
            reports: Reports of all ranks.
            rank: This rank.
        """
        self.drawn |= {name for report in reports for name in report.drawn}
        self.adds_to_grad |= any(report.adds_to_grad for report in reports)
        used = Used(set(reports[rank].used), {key for report in reports for key in report.used})
        self.used[outputs] = self.newest = used
        return used.of_all

    @property
    def varies(self) -> bool:
        """Whether each call needs an exchange, because the network's result contains values besides tensors."""
        return any(leaf is not None and not isinstance(leaf, TensorSpec) for leaf in self.header.leaves)

    def check(self, report: ForwardReport) -> None:
        """Check that this rank computes results of the same form as in the first call.

        Raises:
            RefusedError: The shapes or dtypes have changed.
        """
        if report.header is not None and report.header != self.header:
            raise RefusedError(
                f"the network has returned {_text(report.header)}, but {_text(self.header)} for an earlier batch of "
                "the same shapes, and other ranks rely on it: return tensors whose shapes and dtypes follow from those "
                "of the images"
            )


def _text(header: TensorHeader) -> str:
    return ", ".join(f"{str(spec.dtype).removeprefix('torch.')} {tuple(spec.shape)}" for spec in header.tensors)


# Functions of C, because each call of a network asks for the attributes of all modules and parameters.
_form_of_parameter, _training = attrgetter("requires_grad", "shape"), attrgetter("training")


def form_of(images: Any, modules: Sequence[nn.Module], parameters: Sequence[Tensor], device_kind: str) -> Hashable:
    """Return a key that is equal for batches of the same form. All ranks compute equal keys.

    Hooks are not part of the key, because code for a single rank may register them.

    Args:
        images: The images; on ranks that do not have them, foreign tensors.
        modules: All modules of the network.
        parameters: All parameters of the network.
        device_kind: Type of the ranks' devices.
    """
    leaves, tree = tree_flatten(images)
    with without_functions():
        of_parameters = tuple(map(_form_of_parameter, parameters))
    return (
        tree,
        tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_kind),
        torch.get_autocast_dtype(device_kind),
        tuple(map(_training, modules)),
        of_parameters,
    )
