"""Run forwards of microbatches again: they compute what the first forwards have computed, and leave no trace."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.combining import StoredValues
from cnnstrategies.pipeline.random_draws import Draws
from cnnstrategies.pipeline.repeated_forward import check_parameters, differ, some_elements, versions_of
from cnnstrategies.pipeline.stored_terms import CallTerms

if TYPE_CHECKING:
    from cnnstrategies.pipeline.stage_runner import StageRunner


class KeptInputs(NamedTuple):
    """The inputs of a microbatch's forward that runs again for the backward.

    Attributes:
        arguments: The stage's arguments.
        versions: For each tensor in the arguments, how often it had been changed in place.
        leaves: For each stage that has sent arguments, those whose gradients are sent back.
    """

    arguments: tuple[Any, ...]
    versions: list[int]
    leaves: dict[int, list[Tensor]]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], leaves: dict[int, list[Tensor]], copied: bool) -> Self:
        """Return what is kept of a forward that has not run yet.

        Args:
            arguments: The stage's arguments.
            leaves: See above.
            copied: Whether to keep copies of the arguments, because the forward changes them in place.
        """
        if copied:
            arguments = tree_map(_copy_unless_leaf, arguments)
        return cls(arguments, versions_of(arguments), leaves)

    @property
    def have_changed(self) -> bool:
        """Whether the arguments have been changed in place."""
        return versions_of(self.arguments) != self.versions

    def checked_arguments(self) -> tuple[Any, ...]:
        """Return the arguments.

        Raises:
            ConfigurationError: They have been changed in place.
        """
        if self.have_changed:
            raise ConfigurationError(
                "the images were changed in place after the network's forward and before the backward, in which the "
                "forward has to run again: change a copy of the images, or set activation_checkpointing to never"
            )
        return self.arguments


class SecondForwards:
    """Runs forwards of one call of a divided network a second time, in this rank's stage.

    Create this object before the first forwards. A second forward runs with autograd and computes what the first one
    has computed:

    - It draws the random numbers that the first forward has drawn. Afterwards the generators continue where they were.
    - It finds attributes, modes, hooks, lists and buffers as the call has found them, even if the program has changed
      them since. Afterwards they are again as they were before the second forward. So running statistics are updated
      once, counts count once, and nothing is stored twice.
    - It runs under the autocast of the call.

    Hooks of modules run in both forwards, as under `torch.utils.checkpoint`. What they keep in modules, in objects and
    lists that modules refer to, or in their own variables is that of the first forward. Other effects, such as printing
    or writing to a file, happen twice.

    In the first call with a form, the results of both forwards are compared. A difference means that the forward uses a
    state that this class does not know, such as a random number generator of the user.

    Args:
        runner: The runner of the stage.
        draws: The random draws of the call.
        terms: What the call's forwards store.
        autocast: Whether the call runs under autocast, and the dtype of autocast.
        form: Key that is equal for batches of the same form.
    """

    def __init__(
        self,
        runner: "StageRunner",
        draws: Draws,
        terms: CallTerms,
        autocast: tuple[bool, torch.dtype],
        form: Hashable,
    ) -> None:
        self._runner, self._draws, self._autocast = runner, draws, autocast
        self._form = form, runner.division.network.training, autocast
        self._state = terms.watch.noted()
        self._recorders = runner.buffers.recorders
        self._parameters = [
            (name, tensor, writes(tensor))
            for name, stage, tensor in runner.division.parameters()
            if stage == runner.stage
        ]
        self._first: dict[int, list[Tensor]] = {}

    def note(self, microbatch: int, results: Sequence[Tensor]) -> None:
        """Note the results of a microbatch's first forward, with which the second forward's results are compared."""
        if self._form not in self._runner.compared_forms:
            self._first[microbatch] = [some_elements(tensor) for tensor in results]

    def run(self, microbatch: int, arguments: tuple[Any, ...]) -> tuple[Any, StoredValues]:
        """Run the stage again for a microbatch.

        Args:
            microbatch: The microbatch.
            arguments: The arguments of the microbatch's first forward, with the values that they had there.

        Returns:
            The stage's result, and what the forward has stored. Both are connected to the new graph.

        Raises:
            ConfigurationError: A parameter has changed since the call, so the forward cannot be repeated.
        """
        runner, (enabled, dtype) = self._runner, self._autocast
        check_parameters(self._parameters, "set activation_checkpointing to never")
        with (
            torch.enable_grad(),
            torch.autocast(runner.transport.device.type, dtype, enabled=enabled),
            runner.buffers.again(self._recorders),
            self._draws.again(microbatch),
        ):
            result, stored = self._state.run(lambda: runner.run_stage(*arguments))
            return result, StoredValues.of(stored)

    def check(self, microbatch: int, results: Sequence[Tensor]) -> None:
        """Compare the results of a microbatch's second forward with those of the first one.

        Raises:
            ConfigurationError: The results differ.
        """
        if differ(zip(self._first.pop(microbatch, ()), results, strict=False)):
            raise ConfigurationError(
                f"a forward of stage {self._runner.stage} has given other results when it ran again for the "
                "backward: let its modules keep what they change between calls in attributes, lists or buffers, "
                "and draw random numbers without a generator of their own; or set activation_checkpointing to never"
            )
        self._runner.compared_forms.add(self._form)


def _copy_unless_leaf(value: Any) -> Any:
    """Return a copy of a tensor. A tensor with a gradient cannot be changed in place, and must remain a leaf."""
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value
