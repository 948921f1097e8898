"""When the gradients of a call's parameters are summed over the replicas of a stage.

If the optimizer's step follows the call's backward, the sums begin during the last microbatch's backward. If more
backwards may follow before the step, each replica first adds the gradients of all its backwards (see `DeferredSums`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import writes
from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.known_forms import KnownForm
from cnnstrategies.pipeline.part_gradients import multiply_gradients

if TYPE_CHECKING:
    from cnnstrategies.pipeline.placed_network import PlacedNetwork


class CallSums:
    """The sums of one call's gradients over the replicas of this rank's stage.

    All replicas decide alike when the sums are computed, because the decision follows from the program.

    Args:
        network: The network.
        parameters: By name, the parameters of all stages that are arguments of the call.
    """

    def __init__(self, network: "PlacedNetwork", parameters: Mapping[str, nn.Parameter]) -> None:
        self._network = network
        self._parameters = {name: p for name, p in parameters.items() if self._is_of_stage(name)}
        self._number = network.calls
        self._is_early = False
        self._begun: EarlySums | None = None

    def _is_of_stage(self, name: str) -> bool:
        return self._network.division.owner[name] == self._network.runner.stage

    def begin(self, form: KnownForm | None) -> EarlySums | None:
        """Decide when the sums are computed. Return the sums that the last backward begins; None if it begins none.

        Args:
            form: What all ranks know about calls of this form. In the first backward it is not known which parameters
                have a gradient on any replica, so nothing begins.
        """
        group, self._begun = self._network.runner.replicas.group, None
        self._is_early = group is not None and self._step_follows() and not self._has_deferred()
        if group is not None and self._is_early and form is not None and form.used and not form.adds_to_grad:
            used = {key for known in form.used.values() for key in known.of_all}
            self._begun = EarlySums([p for name, p in self._parameters.items() if name in used], group)
        return self._begun

    def _step_follows(self) -> bool:
        """Whether this is the only call whose backward the optimizer's step waits for, as far as is known.

        A call in the order 1F1B does not know whether another call follows. Other calls that compute the declared loss
        decide as this order does, so that a run that continues from a checkpoint has equal gradients in each bit.
        """
        network = self._network
        return network.window_ends and self._number == 1 and (network.declared is not None or network.calls == 1)

    def _has_deferred(self) -> bool:
        """Whether gradients of earlier backwards are waiting to be summed together with those of this call."""
        sums, deferred_sum_of = self._network.places.sums, self._network.places.deferred_sum_of
        if not sums.waiting:
            return False
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        return any(deferred_sum_of(gradient) is not None for gradient in gradients)

    def summed(self, parts: dict[str, Tensor | None], factor: float | Tensor, keep: bool) -> dict[str, Tensor]:
        """Return the gradients of this stage's parameters, summed over the replicas now or later.

        All replicas must call this, outside of the rules for placed tensors.

        Args:
            parts: By name, for each parameter that has a gradient on any replica: this replica's part of the gradient,
                or None if its microbatches do not give the parameter a gradient. The dictionary is emptied.
            factor: Factor of the gradients.
            keep: Whether the parts must not change.
        """
        runner, begun = self._network.runner, self._begun
        parameters = {name: self._parameters[name] for name in parts}
        whole = {name: parameter for name, parameter in parameters.items() if begun is not None and parameter in begun}
        gradients: list[Tensor | None] = [
            torch.zeros_like(parameter) if (part := parts[name]) is None else part
            for name, parameter in parameters.items()
        ]
        parts.clear()
        if begun is not None:
            with runner.times.timed("reduce"), runner.transport.collective("summing the gradients of the stage"):
                begun.wait()
            gradients = [
                begun.sum_of(parameter) if name in whole else gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            ]
        elif self._is_early and runner.replicas.group is not None:
            # Autograd may return one tensor for several parameters, or a tensor that other code uses.
            copies = [
                torch.empty_like(parameter).copy_(gradient)
                for parameter, gradient in zip(parameters.values(), gradients, strict=True)
                if gradient is not None
            ]
            runner.sum_gradients(copies)
            gradients, whole = [*copies], parameters
            del copies
        multiplied = multiply_gradients(gradients, factor, keep=keep or begun is not None)
        results = dict(zip(parameters, map(_as_gradient, parameters.values(), multiplied), strict=True))
        if runner.replicas.group is None:
            return results
        self._network.summed = [(parameter, _state_of(results[name])) for name, parameter in whole.items()]
        place = self._network.ranks[runner.stage]
        defer = self._network.places.sums.defer
        return {
            name: gradient if name in whole else defer(gradient, place, runner.sum_gradients)
            for name, gradient in results.items()
        }


def copy_changed_gradients(network: "PlacedNetwork") -> None:
    """Give all replicas of this rank's stage equal gradients, after the backwards of a step of the optimizer.

    The program may have added to a sum over the replicas, for example the gradient of a penalty. Each replica has
    computed this gradient from its own copies, which may differ in the last bit on a GPU. The first replica's result
    is therefore copied to the others. All replicas call this after deferred sums have been computed, outside of the
    rules for placed tensors.
    """
    summed, network.summed = network.summed, []
    gradients = [(parameter.grad, state) for parameter, state in summed]
    changed = [gradient for gradient, state in gradients if gradient is not None and _state_of(gradient) != state]
    network.runner.replicas.copy_from_first(changed)


def _state_of(gradient: Tensor) -> tuple[int, int]:
    """Return the address and the number of changes of a gradient, to find out later whether it is the same one."""
    return gradient.data_ptr(), writes(gradient)


def _as_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    """Return a gradient with the strides of its parameter. Autograd would copy a gradient with other strides."""
    assert gradient is not None
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
