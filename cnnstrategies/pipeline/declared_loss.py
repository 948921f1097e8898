"""The loss that a module declares, which allows a call of the network to run backwards between its forwards.

A module declares the mean loss of a batch by an attribute ``loss(outputs, targets)``, and its training step calls it.
The first step shows with which tensors: the network's results, and tensors of the batch. In later steps the last stage
can compute the gradients of the declared loss for each microbatch before the step itself computes the loss. The stages
then run in the order 1F1B, which stores the activations of few microbatches.

The gradients of parameters and images are linear in the gradients of the network's results. Whatever the step does with
the loss, the gradients are right if the gradients that arrive at the network's results are those of the declared loss,
times a factor. :mod:`.gradient_check` compares them in every backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies.pipeline.gradient_check import (
    GradientComparison,
    GradientVerdict,
    Pairs,
    begin_comparison,
    different,
)
from cnnstrategies.pipeline.late_verdicts import LateVerdicts
from cnnstrategies.pipeline.loss_arguments import LossArguments, UnknownArgumentError
from cnnstrategies.pipeline.part_gradients import without_autocast
from cnnstrategies.placed import Places

NAME = "loss"  # Name of the attribute that declares the loss.


class DeclaredLoss:
    """A module's declared loss, and what the first step has shown about its use.

    All ranks create this object, and know the same.

    Args:
        module: The module.
        places: The rules of this rank.
        last: Ranks of the last stage.
        weight: Function that returns the weight of a batch's loss in a mean over several batches, from the targets. By
            default the weight is the number of samples.
        silent: Returns a context in which the module logs nothing.
        scale: Function that returns the factor by which the step's loss will be multiplied, such as the scale of a
            gradient scaler. Gradients of the dtype float16 would be zero without it.
        saves_memory: Whether steps that run in the order of GPipe, before the order 1F1B or because a check has failed,
            compute activations again, so that they do not need more memory than the order 1F1B.
        settles_late: Whether backwards of calls in the order 1F1B do not wait for the device, see
            :mod:`.late_verdicts`. This requires connections of the ranks' devices.

    Attributes:
        function: The module's own loss.
        news: A text about the order of later steps, which has not been shown to the user, and whether it is a warning.
            None if there is no such text.
        late: The comparisons that are read late; None if each backward waits for its comparison.
        steps: Number of training steps that have begun.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Places,
        last: tuple[int, ...],
        weight: Callable[[Any], Any] | None = None,
        silent: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scale: Callable[[], Tensor | float] = lambda: 1.0,
        saves_memory: bool = False,
        settles_late: bool = False,
    ) -> None:
        self.module, self.places, self.last = module, places, last
        self.weight, self.silent, self.scale, self.saves_memory = weight, silent, scale, saves_memory
        self.function: Callable[..., Any] = getattr(module, NAME)
        self.news: tuple[str, bool] | None = None
        self.late = LateVerdicts() if settles_late else None
        self.steps = 0
        # By the number of the call in its step: how the step calls the loss with the result of this call, or why this
        # call cannot run in the order 1F1B.
        self._known: dict[int, LossArguments | str] = {}
        self._batch: Sequence[Any] | None = None
        self._begun = 0
        # The calls of the current step. Their results must not be referred to after the step.
        self._calls: list[tuple[Sequence[Tensor], LossOfCall]] = []

    @contextmanager
    def step(self, arguments: Any) -> Iterator[None]:
        """Return a context for a training step, in which the use of the declared loss is observed.

        Args:
            arguments: Nested containers with the step's batch.
        """
        self.steps += 1
        if self.reason is not None:
            yield
            return
        attributes, is_attribute = vars(self.module), NAME in vars(self.module)
        self.function = getattr(self.module, NAME)
        observed = attributes[NAME] = ObservedLoss(self.function, self._calls)
        self._batch, self._begun = tree_leaves(arguments), 0
        try:
            yield
        finally:
            self._batch = None
            self._calls.clear()
            if attributes.get(NAME) is observed:
                del attributes[NAME]
                if is_attribute:
                    attributes[NAME] = self.function

    def begin(self, samples: int) -> "LossOfCall | None":
        """Begin a call of the network whose backward may follow. Return None outside of training steps.

        Args:
            samples: Number of samples of the batch.
        """
        if self._batch is None:
            return None
        self._begun += 1
        known = self._known.get(self._begun - 1)
        if isinstance(known, LossArguments) and not known.are_in(self._batch, samples):
            known = "the batch has another structure than in the first step"  # For this call only.
        return LossOfCall(self, self._begun - 1, self._batch, samples, known)

    def observe(self, call: "LossOfCall", outputs: Sequence[Tensor]) -> None:
        """Observe the use of a call's results until the end of the step.

        Args:
            call: The call.
            outputs: The results, as the step gets them.
        """
        if self._batch is not None:
            self._calls.append((outputs, call))

    def learn(self, number: int, known: LossArguments | str) -> None:
        """Remember how a step uses the result of a call, or why the call cannot run in the order 1F1B.

        Args:
            number: Number of the call in its step.
            known: See `known`.
        """
        before = self._known.get(number)
        self._known[number] = known
        calls = f"call {number + 1} of the network in a step runs" if number else "the stages run"
        if not isinstance(known, str):
            self.news = f"{calls} in the order 1f1b from the next step on", False
        elif before is None:
            self.news = f"{calls} in the order gpipe: {known}", False
        else:
            text = f"{calls} in the order gpipe from now on, and the forwards of this step have run twice: {known}"
            self.news = text, True

    @property
    def reason(self) -> str | None:
        """Why no call runs in the order 1F1B; None if a call does, or if no step has shown it yet."""
        reasons = [known for known in self._known.values() if isinstance(known, str)]
        return reasons[0] if reasons and len(reasons) == len(self._known) else None


class ObservedLoss:
    """The module's attribute ``loss`` during a training step.

    Args:
        function: The module's own loss.
        calls: The calls of the network in this step, with their results.
    """

    def __init__(self, function: Callable[..., Any], calls: "Sequence[tuple[Sequence[Tensor], LossOfCall]]") -> None:
        self._function, self._calls = function, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss."""
        if torch.is_grad_enabled():
            ids = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for outputs, call in self._calls:
                if any(id(output) in ids for output in outputs):
                    return call.compute(self._function, outputs, args, kwargs)
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


class LossOfCall:
    """The declared loss of one call of the network.

    Args:
        declared: The module's declared loss.
        number: Number of the call in its step.
        batch: Leaves of the step's batch.
        samples: Number of samples.
        known: See `DeclaredLoss`; None if no step has shown it yet.

    Attributes:
        declared: See above.
        expected: How the step is expected to call the loss with the result; None if this is not known.
        is_open: Whether the backward of this call shows whether later steps can run in the order 1F1B.
        failure: Why the loss of a microbatch cannot be computed; None if it can.
    """

    def __init__(
        self,
        declared: DeclaredLoss,
        number: int,
        batch: Sequence[Any],
        samples: int,
        known: LossArguments | str | None,
    ) -> None:
        self.declared, self._number, self._samples = declared, number, samples
        self.is_open = known is None
        self.expected = known if isinstance(known, LossArguments) else None
        self._batch: Sequence[Any] = () if isinstance(known, str) else batch
        self._targets: dict[int, Tensor] = {}
        self._whole_weight: Any = None
        self._scale: Tensor | float = 1.0
        self._used: LossArguments | None = None  # How the step has called the loss.
        self._reason: str | None = "training_step does not call loss() with the network's result"
        self.failure: str | None = None
        # What the last backward has computed: the gradient of the loss, and the gradients of the network's results
        # that have come through the loss.
        self._of_loss: Tensor | None = None
        self._through: list[Tensor | None] = []

    def compute(self, function: Callable[..., Any], outputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Return the loss that the step computes from the network's results.

        Args:
            function: The loss.
            outputs: The network's results.
            args: Positional arguments of the loss.
            kwargs: Keyword arguments of the loss.
        """
        if self._used is not None or not (self.is_open or self.expected):
            return function(*args, **kwargs)
        try:
            used = LossArguments.of(args, kwargs, outputs, self._batch, self._samples)
        except UnknownArgumentError as error:
            self._reason = str(error)
            return function(*args, **kwargs)
        # Gradients that come to these views have come through this call of the loss.
        views = [output.view_as(output) if output.requires_grad else output for output in outputs]
        self._through = [None] * len(views)
        for index, view in enumerate(views):
            if view.requires_grad:
                view.register_hook(partial(self._note_gradient, index))  # type: ignore[no-untyped-call]
        args, kwargs = used.fill(views, self._batch)
        loss = function(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            self._reason = "loss() does not return a tensor with one number that has a gradient"
            return loss
        loss.register_hook(self._note_loss)  # type: ignore[no-untyped-call]
        self._used, self._reason = used, None
        return loss

    def _note_gradient(self, index: int, gradient: Tensor) -> None:
        self._through[index] = gradient.detach()

    def _note_loss(self, gradient: Tensor) -> None:
        self._of_loss = gradient.detach()

    @property
    def is_used(self) -> bool:
        """Whether the step has called the loss with the network's result."""
        return self._used is not None

    def prepare(self) -> None:
        """Bring the targets to the last stage. All ranks must call this, before :meth:`gradients`."""
        arguments = self.expected or self._used
        assert arguments is not None
        targets = {index: self._batch[index] for index in arguments.in_batch}
        brought = self.declared.places.bring_all(targets.values(), self.declared.last, "targets")
        self._targets = {index: brought.get(id(target), target) for index, target in targets.items()}
        self._scale = self.declared.scale()

    def gradients(self, outputs: Sequence[Tensor], rows_of: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Return what a microbatch contributes to the gradients of the network's results.

        If the loss cannot be computed, the gradients are zero, and :attr:`failure` has the reason.

        Only the last stage calls this. The caller restores the generators and what the loss stores.

        Args:
            outputs: The microbatch's results.
            rows_of: Function that returns the microbatch's rows of a tensor with the rows of the batch.
        """
        try:
            return self._gradients([output.detach() for output in outputs], rows_of)
        except Exception as error:
            self.failure = f"loss() fails for a microbatch ({type(error).__name__}: {error})"
            return [torch.zeros_like(output) if output.is_floating_point() else None for output in outputs]

    def _gradients(self, leaves: Sequence[Tensor], rows_of: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        arguments = self.expected or self._used
        assert arguments is not None
        wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        rows = {index: rows_of(target) for index, target in self._targets.items()}
        weight = self._weight(arguments, rows, len(leaves[0]))
        args, kwargs = arguments.fill(leaves, rows)
        with torch.enable_grad(), self.declared.silent():
            loss = self.declared.function(*args, **kwargs)
        is_positive = not isinstance(weight, Tensor) and weight > 0
        of_loss = torch.full_like(loss, weight) if is_positive else torch.ones_like(loss) * weight
        if isinstance(self._scale, Tensor) or self._scale != 1:
            of_loss = of_loss * self._scale
        of_loss = of_loss.to(loss.dtype)
        with without_autocast(loss.device.type):
            gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, of_loss, allow_unused=True)
        if not is_positive:
            # The mean over nothing is not a number.
            gradients = [None if part is None else torch.where(of_loss != 0, part, 0.0) for part in gradients]
        parts = iter(gradients)
        return [next(parts) if leaf.requires_grad else None for leaf in leaves]

    def _weight(self, arguments: LossArguments, rows: Any, samples: int) -> Any:
        """Return the weight of a microbatch in the batch's mean."""
        weight = self.declared.weight
        if weight is None:
            return samples / self._samples
        if self._whole_weight is None:
            self._whole_weight = weight(arguments.targets(self._targets))
        part = weight(arguments.targets(rows))
        if isinstance(self._whole_weight, Tensor) or isinstance(part, Tensor):
            return torch.nan_to_num(torch.as_tensor(part / self._whole_weight))
        return part / self._whole_weight if self._whole_weight else 0.0

    def compare(
        self, arrived: Sequence[Tensor | None], has_stored: bool, pairs: Callable[[], Pairs]
    ) -> GradientVerdict | GradientComparison:
        """Compare the gradients that have arrived at the network's results with those of the declared loss.

        This does not wait for the device.

        Only the last stage calls this, once for each backward.

        Args:
            arrived: Gradients of the results.
            has_stored: Whether values that the network's forward stores have gradients as well.
            pairs: See `begin_comparison`.
        """
        of_loss, self._of_loss = self._of_loss, None
        through, self._through = self._through, [None] * len(self._through)
        if reason := self.failure or self._reason:
            return different(reason)
        if self.expected is not None and self._used != self.expected:
            return different("training_step calls loss() with other arguments than in the first step")
        if has_stored:
            return different("the step's loss depends on values that the network's forward stores")
        if of_loss is None:
            return different("the step does not train what loss() returns")
        return begin_comparison(arrived, through, of_loss, self._scale, pairs)

    def settle(self, verdict: GradientVerdict) -> None:
        """Draw the conclusions from the comparison of a backward. All ranks call this."""
        if verdict.kind == "different":
            self.declared.learn(self._number, verdict.reason)
            self.is_open, self.expected = False, None
        elif verdict.kind == "factor" and self.is_open:
            assert self._used is not None
            self.declared.learn(self._number, self._used)
            self.is_open = False
