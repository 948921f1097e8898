"""A call of a divided network in the order 1F1B: the backwards of microbatches run between the forwards.

The gradients of the network's results are computed for each microbatch, before the user's code has computed a loss of
the batch. The sums of the parameters' gradients are kept until the backward of the batch. If the backward needs other
gradients, the whole call can run again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from cnnstrategies._torch_private import writes
from cnnstrategies.pipeline.timetable import KINDS, Checkpointing, Task
from cnnstrategies.pipeline.whole_batch import CallArguments, WholeBatch, tensors_in

if TYPE_CHECKING:
    from cnnstrategies.pipeline.stage_runner import StageRunner

# Function that returns the gradients of a microbatch's results, in the last stage. The arguments are the results, and a
# function that returns the microbatch's rows of a tensor with the rows of the batch.
GradientsOfResults = Callable[[Sequence[Tensor], Callable[[Tensor], Tensor]], Sequence[Tensor | None]]


class Interleaving(NamedTuple):
    """Functions that a call in the order 1F1B needs.

    Attributes:
        gradients: See `GradientsOfResults`.
        has_changed: Function that returns whether the backwards give gradients to other tensors than in earlier calls.
            The argument is the batch, whose backwards have run.
    """

    gradients: GradientsOfResults
    has_changed: Callable[[WholeBatch], bool]


class InterleavedBatch(WholeBatch):
    """A call in which the backwards run between the forwards.

    Args:
        runner: The runner of the stage.
        call: The arguments of the call. A batch of its form must have run before.
        interleaving: Functions for this order.
    """

    interleaves = True

    def __init__(self, runner: "StageRunner", call: CallArguments, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self.early, runner.early = runner.early, None
        self._salt, self._drawn = runner.unseen_draws, {*runner.drawn}
        super().__init__(runner, call._replace(in_order=False, checkpointing=None), runner.microbatches)
        # The functions refer to the call that holds this batch. Without the cycle, both are freed after the step.
        del self._interleaving

    def _run_forwards(self) -> None:
        self._versions = self._current_versions()
        self._state = self.terms.watch.noted()
        self.terms.drop_arguments()
        # What the declared loss stores is undone, so it must not be taken for what a forward stores.
        self.terms.is_quiet &= not (self._runner.last and self.terms.loss_stores)
        self._begin_backward()
        with self._accumulated():
            self._runner.run_tasks(KINDS, "1f1b", self.sizes, self._key, self._run)

    def _run(self, task: Task) -> None:
        microbatch = task.microbatch
        if task.kind == "forward":
            self._forward(microbatch)
            if microbatch not in self._kept:
                self.terms.drop_graph(microbatch)
            return
        gradients: Sequence[Tensor | None] = ()
        if self._runner.last and microbatch in self._results:  # If it is missing, the batch runs again as a whole.
            with self._runner.times.timed("forward", microbatch, "loss"):
                gradients = self._interleaving.gradients(
                    self._results[microbatch], partial(self.rows.of_microbatch, microbatch=microbatch)
                )
            self.started[microbatch] = gradients
            self.terms.undo()
        if microbatch == self.microbatches[-1] and self._ends_together():
            self._runner.buffers.send()
        self._backward(microbatch, gradients, keep=False, of_stored=None)

    def _has_changed(self) -> bool:
        return self._interleaving.has_changed(self)

    def gradients(self, keep: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the declared loss. See `WholeBatch.backward`.

        Args:
            keep: Whether another backward of this batch may follow. The caller must then not change the gradients.
        """
        self._use_graph(keep)
        sums, of_images = [*self._sums], [*self._of_images]
        if not keep:
            self._sums, self._of_images = [], []
        return sums, of_images

    def run_forwards_again(self, checkpointing: Checkpointing | None = None) -> WholeBatch:
        """Run the forwards again, without the backwards, and return the new call. All ranks must call this.

        The forwards draw the same random numbers, and find the same buffers and the same values on modules. All of
        these are afterwards what they were before this method.

        Args:
            checkpointing: See `CallArguments`.

        Raises:
            RuntimeError: A parameter or the images have changed since the call.
        """
        if self._versions != self._current_versions():
            raise RuntimeError(
                "a parameter or the images were changed in place between the network's forward and the backward: call "
                "the optimizer's step after all backwards, and change a copy of the images"
            )
        call = self._call._replace(checkpointing=checkpointing)

        def run() -> WholeBatch:
            return RepeatedBatch(self._runner, call, self._runner.microbatches)

        with self._conditions():
            return self._state.run(run)[0]

    def _current_versions(self) -> list[int]:
        images = tensors_in(self._images) if self._runner.stage == 0 else []
        return [writes(tensor) for tensor in (*self.parameters, *images)]

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """Return a context with the autocast and the random numbers of the call."""
        runner = self._runner
        salt, runner.unseen_draws = runner.unseen_draws, self._salt
        drawn, runner.drawn = runner.drawn, self._drawn
        try:
            with self.under_autocast(), self.draws.at_start(), runner.under(self._placement):
                yield
        finally:
            runner.unseen_draws, runner.drawn = salt, drawn


class RepeatedBatch(WholeBatch):
    """A call that repeats another call, and does not count for running statistics."""

    updates_buffers = False
