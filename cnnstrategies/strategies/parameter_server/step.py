"""How gradients leave during backward, and how a forward waits for its own parameters only."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.strategies.parameter_server.differences import Differences
from cnnstrategies.strategies.parameter_server.outer_steps import OuterSteps

LOOK_SHARE = 0.1  # of a step's time


class Stepper:
    """Connects a module's training to a worker.

    Each gradient is pushed by a hook as soon as backward has accumulated it, and each module waits for its own
    parameters right before its forward.

    Args:
        module: The module that is trained.
        worker: Its connection to the servers.
        specification: Names the parameters.
        optimizer: The user's; its parameter groups hold the hyper-parameters of each step.
        eager: Wait for all parameters at the end of each step, since something else reads them.
        outer: In mode ``local``, when outer steps are made.
        catches_up: Leave out steps that the others have made without this worker.
        workers: How many there are now, where each makes outer steps on its own; None where all make them together.
    """

    def __init__(
        self,
        module: nn.Module,
        worker: Worker | CombinedWorker,
        specification: Specification,
        optimizer: Optimizer,
        eager: bool,
        outer: OuterSteps | None = None,
        catches_up: bool = False,
        workers: Callable[[], int] | None = None,
    ) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.eager = eager
        self.outer = outer
        self.accumulating = False
        self.samples = 0
        self._catches_up = catches_up
        self._left_out = 0  # steps, the present one among them
        named = dict(module.named_parameters())
        self.parameters: list[nn.Parameter] = [named[info.name] for info in specification.parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._in_step = False
        self._codecs = worker.codecs
        self._pushed: set[int] = set()
        self._options = [group.options for group in specification.groups]  # in mode local the outer optimizer's
        self._on_its_way: int | None = None  # own steps since an exchange has begun that is not over
        self._looked: float | None = None  # when for its values, after they had not come in time
        self._workers = workers
        self._differences = None if workers is None else Differences(self.parameters)
        self._handles: list[Any] = []
        if outer is None:
            for index, parameter in enumerate(self.parameters):
                handle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        for child in () if outer is not None else module.modules():
            own = [self._index[id(p)] for p in child.parameters(recurse=False) if id(p) in self._index]
            if own:
                self._handles.append(child.register_forward_pre_hook(self._waiter(own)))
        if outer is None:
            self._handles.append(optimizer.register_step_pre_hook(self._take_gradients))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leaves_out(self) -> bool:
        """Whether the batch that comes is of a step that the others have made already: it would be worked on in vain.

        The steps' numbers stay those of the trainer, and with them schedules and the end of the epoch.
        """
        if self._catches_up and not self._left_out and not self.samples:
            self.worker.wait(0)  # The forward waits for it anyway. It says how far the others are.
            if self.worker.late:
                self._left_out = self.worker.catch_up()
        return self._left_out > 0

    def before_backward(self) -> None:
        """The next backward is the last one of a step, unless gradients are being accumulated."""
        if not (self.accumulating or self.outer is not None or self._left_out):
            self._begin()

    @property
    def all_pushed(self) -> bool:
        """Whether all that this worker has computed has left it."""
        return self.outer is None or not self.outer.left()

    def take(self) -> None:
        """Wait until all parameters are up to date."""
        if self._on_its_way is None:
            self.worker.wait_all()
        self._take()

    def refresh(self) -> None:
        """Take the servers' present values, when nothing is left to be pushed."""
        self.worker.refresh()
        if self._differences is not None:
            self._differences.begin()

    def after_step(self) -> None:
        """The optimizer's step was made: in mode ``local`` by the optimizer itself."""
        if self.outer is not None:
            samples, self.samples = self.samples, 0
            due = self.outer.stepped(samples)
            if self._on_its_way is not None:
                self._on_its_way += 1
                if self._on_its_way >= self.outer.overlap:
                    self._take(self.outer.patience)
            if due is not None and self._on_its_way is None:
                self._exchange([due], goes_on=self.outer.goes_on and not self.eager)
                if not self.outer.overlap:
                    self._take(self.outer.patience)  # Else some own steps later.
        elif self.eager:
            self.worker.wait_all()

    def outer_step(self, agree: Callable[[tuple[int, bool]], Iterable[tuple[int, bool]]] | None = None) -> None:
        """In mode ``local``, have the servers make an outer step with all that is left, and go on from there.

        What has had no own steps since its last one is left out: the momentum alone must not move the weights.

        Args:
            agree: Where workers may have made different numbers of outer steps, gives the number of each worker's next,
                and whether something is left. Those that are behind make up for it, and all make the last one.
        """
        assert self.outer is not None
        if agree is None:
            self._take()
            left = self.outer.left()
        else:
            known = list(agree((self.worker.step, bool(self.outer.left()))))
            self._take()
            everything = list(range(len(self.outer.fragments)))
            while self.worker.step < max(step for step, _ in known):
                self._exchange(everything, goes_on=False)
            left = everything if any(is_left for _, is_left in known) else []
        if left:
            self._exchange(left, goes_on=False)

    def _exchange(self, fragments: list[int], goes_on: bool) -> None:
        """Push some fragments; their new values come now, or after some further own steps."""
        assert self.outer is not None
        self._take()
        options = self._options
        if self._workers is not None:
            options = [{**group, "workers": max(self._workers(), 1)} for group in options]
        self.worker.begin_step(options, max(self.outer.exchanged(fragments), 1))
        self._tell_of_codecs()
        for number in fragments:
            for index in self.outer.fragments[number]:
                own = self._differences
                self.worker.push(index, self.parameters[index].detach() if own is None else own.take(index))
        assert not isinstance(self.worker, CombinedWorker), "in mode local each pushes for itself"
        self.worker.end_step(goes_on)
        self._on_its_way = 0
        if not goes_on:
            self._take()

    def _take(self, patience: float | None = None) -> None:
        """Wait for the values that are on their way.

        Args:
            patience: Seconds; behind a link that is cut they come later, and own steps go on.
        """
        if self._on_its_way is None:
            return
        if self._differences is not None:
            with self._differences.kept():
                self.worker.wait_all()
        elif patience is None:
            self.worker.wait_all()
        else:
            # Once that was in vain, a look after each own step takes a tenth of its time.
            now = time.monotonic()
            seconds = patience if self._looked is None else LOOK_SHARE * (now - self._looked)
            assert not isinstance(self.worker, CombinedWorker), "in mode local each pushes for itself"
            there = self.worker.wait_all_for(seconds)
            if not there and self._looked is None:
                what = f"no new values for {patience:g} s after outer step {self.worker.step - 1}"
                print(f"{what}: a link may be cut; own steps go on until they come", file=sys.stderr, flush=True)
            self._looked = None if there else time.monotonic()
            if not there:
                return
        self._on_its_way = self._looked = None

    def _begin(self) -> None:
        if not self._in_step:
            self.worker.begin_step(hyperparameters(self.optimizer), max(self.samples, 1))
            self._in_step = True
            self._pushed.clear()
            self._tell_of_codecs()

    def _tell_of_codecs(self) -> None:
        if self.worker.codecs != self._codecs:
            self._codecs = pushes, pulls = self.worker.codecs
            rank_zero_info(f"From step {self.worker.step} on compression: {pushes}, pull_compression: {pulls}")

    def _end(self) -> None:
        self.worker.end_step()
        self._in_step = False
        self.samples = 0

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def push(parameter: Tensor) -> None:
            if self._in_step and parameter.grad is not None:
                self.worker.push(index, parameter.grad)
                self._pushed.add(index)

        return push

    def _waiter(self, indices: list[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            for index in indices:
                self.worker.wait(index)

        return wait

    def _take_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Have the optimizer's step run its closure, and find no gradients after it: the servers have them."""
        closure = kwargs["closure"]

        def closure_then_push() -> Any:
            output = closure()
            if self._left_out:
                self._left_out -= 1
                return output
            self._begin()
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None and index not in self._pushed:
                    self.worker.push(index, parameter.grad)
                parameter.grad = None
            self._end()
            return output

        return args, {**kwargs, "closure": closure_then_push}
