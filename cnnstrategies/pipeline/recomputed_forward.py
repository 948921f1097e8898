"""Compute the activations of a network again in the backward, in one process and without stages on other devices."""

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from cnnstrategies._torch_private import put_buffer, writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.network_inputs import as_images, inputs_of_call, network_inputs
from cnnstrategies.pipeline.noted_state import NotedState
from cnnstrategies.pipeline.repeated_forward import check_parameters, differ, some_elements, versions_of
from cnnstrategies.pipeline.stage import IMAGES
from cnnstrategies.pipeline.stored_watch import StoredWatch
from cnnstrategies.runtime.generator_states import GeneratorStates

# Larger buffers are not copied before a forward. In a second forward they get the values of the first one back only if
# torch counts the writes to them, which it does except in the kernels of BatchNorm.
_LARGE = 1 << 20


class RecomputedForward:
    """The ``forward`` of a network that computes activations again in the backward, until :meth:`remove`.

    The network is cut into segments. After the forward, only the values that pass from one segment to another, and the
    activations of the last segment, are in memory. The backward of each other segment first runs the segment's forward
    again, by `torch.utils.checkpoint`. The last segment does not run again, because its backward begins at once.

    A second forward computes what the first one has computed, and leaves no trace:

    - It draws the random numbers that the first forward has drawn.
    - It finds attributes, modes, hooks, lists and buffers as the call has found them, even if the program has changed
      them since. Afterwards they are again as they were. So running statistics are updated once.
    - It runs under the autocast of the call.

    Hooks of modules run in both forwards. What they keep in modules, in objects that modules refer to, or in their own
    variables is that of the first forward. Other effects, such as printing, happen twice.

    In the first call of each mode, the results of both forwards are compared.

    Calls without autograd, calls with other arguments than tensors, and calls of `torch.func.functional_call` run the
    network's own forward, and keep all activations.

    Args:
        network: The network. It gets this object as its attribute ``forward``.
        divide: Function that returns the division of the network into segments.
        owner: Module in which forwards may store values, such as the module that contains the network.
        copies: Networks that are copies of the divided network; see :meth:`remove`.
        traced: The whole network's graph for training, for other code that needs it; None if there is none.
    """

    def __init__(
        self,
        network: nn.Module,
        divide: Callable[[], Division],
        owner: nn.Module,
        copies: "weakref.WeakSet[nn.Module] | None" = None,
        traced: fx.GraphModule | None = None,
    ) -> None:
        self.network, self.traced = network, traced
        self._divide, self._owner = divide, owner
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet() if copies is None else copies
        self._copies.add(network)
        # Tracing reads the names of the network's inputs from the signature of its attribute `forward`.
        self.__signature__ = inspect.signature(partial(type(network).forward, network))
        self._inputs = network_inputs(network)
        self._has_warned = False
        self.compared: set[tuple[int, bool]] = set()  # Segments and modes whose second forwards have been compared.
        vars(network)["forward"] = self

    @cached_property
    def division(self) -> Division:
        """The division of the network. A copy is divided in its first call, because many copies are never called."""
        return self._divide()

    @cached_property
    def watch(self) -> StoredWatch:
        """The watch that notes the state of modules at the start of a call."""
        owned = any(module is self.network for module in self._owner.modules())
        return StoredWatch(self._owner if owned else self.network, self.network)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's result."""
        if torch.is_grad_enabled():
            images = self._images(args, kwargs)
            if images is not None and all(isinstance(p, nn.Parameter) for p in self.network.parameters()):
                return _Call(self, images).run()
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{type(self.network).__name__} is called with other values than tensors, or with other "
                    "parameters: such calls keep all activations for the backward",
                    stacklevel=2,
                )
        plain: Any = type(self.network).forward
        return plain(self.network, *args, **kwargs)

    def _images(self, args: Any, kwargs: Any) -> Any:
        """Return the network's inputs, a tuple if there are several; None if the call is of another kind."""
        inputs, has_others = inputs_of_call(self.__signature__, self._inputs, args, kwargs)
        if has_others or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
            return None
        return as_images(inputs)

    def for_copy(self, network: nn.Module) -> "RecomputedForward":
        """Return the ``forward`` of a copy of the network, which computes activations again as well."""
        return RecomputedForward(network, lambda: self.division.for_copy(network), network, self._copies)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the attribute ``forward`` of a copy of the network that ``copy.deepcopy`` is making."""
        network = memo.get(id(self.network))
        return self if network is None else self.for_copy(network)

    def __reduce__(self) -> Any:
        """Pickle the network's own ``forward``."""
        return partial, (type(self.network).forward, self.network)

    def remove(self) -> None:
        """Give the network and its copies their own ``forward`` back."""
        for network in self._copies:
            if isinstance(vars(network).get("forward"), RecomputedForward):
                del vars(network)["forward"]


class _Call:
    """One call of the network, until its backward is over.

    Args:
        forward: The network's forward.
        images: The network's inputs.
    """

    def __init__(self, forward: RecomputedForward, images: Any) -> None:
        self.forward, self.division, self._images = forward, forward.division, images
        network = self.division.network
        forward.watch.begin()
        self.state: NotedState = forward.watch.noted()
        self._buffers = [
            (module, name, buffer.detach().clone())
            for module in network.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.nbytes <= _LARGE and not buffer.is_meta
        ]
        self._parameters = [(name, parameter, writes(parameter)) for name, parameter in network.named_parameters()]

    def run(self) -> Any:
        """Return the network's result."""
        graphs, values = self.division.graphs(), {IMAGES: self._images}
        last = len(graphs) - 1
        for number, graph in enumerate(graphs):
            inputs = [values[name] for name in graph.inputs]
            if number == last:
                break
            segment = _Segment(self, number)
            # What follows the last saved tensor need not run again, unless the results are compared.
            with set_checkpoint_early_stop(False) if segment.is_compared else nullcontext():
                results = checkpoint(segment, *inputs, use_reentrant=False, preserve_rng_state=True)
            values.update(zip(graph.outputs, results, strict=True))
            later = {name for following in graphs[number + 1 :] for name in following.inputs}
            values = {name: value for name, value in values.items() if name in later}
        return self.division.run(last, *inputs)

    @contextmanager
    def noted_buffers(self) -> Iterator[None]:
        """Return a context in which modules have copies of the buffers, with the values from the start of the call."""
        present = []
        for module, name, values in self._buffers:
            if isinstance(buffer := getattr(module, name, None), Tensor):
                present.append((module, name, buffer))
                put_buffer(module, name, values.clone())
        try:
            yield
        finally:
            for module, name, buffer in present:
                put_buffer(module, name, buffer)

    def check_parameters(self) -> None:
        """Raise a ConfigurationError if a parameter has changed since the call, so that no forward can be repeated."""
        check_parameters(self._parameters, "leave out ActivationCheckpointing")


class _Segment:
    """A segment of the network in one call: a function whose first run is the forward.

    Args:
        call: The call.
        number: Number of the segment.
    """

    def __init__(self, call: _Call, number: int) -> None:
        self._call, self._number = call, number
        self._key = number, call.division.network.training
        self.is_compared = self._key not in call.forward.compared
        self._first: list[Tensor] = []
        self._generators: GeneratorStates | None = None
        self._versions: list[int] = []

    def __call__(self, *inputs: Any) -> Any:
        """Run the segment for the first time, or again."""
        device = next((leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), torch.device("cpu"))
        if self._generators is not None:
            return self._run_again(inputs, device)
        self._generators = GeneratorStates.current(device)
        self._versions = versions_of(inputs)
        results = self._call.division.run(self._number, *inputs)
        if self.is_compared:
            self._first = [some_elements(leaf) for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        return results

    def _run_again(self, inputs: Sequence[Any], device: torch.device) -> Any:
        call = self._call
        call.check_parameters()
        if versions_of(inputs) != self._versions:
            raise ConfigurationError(
                "the images were changed in place after the network's forward and before the backward, in which the "
                "forward has to run again: change a copy of the images, or leave out ActivationCheckpointing"
            )

        def run() -> Any:
            with call.noted_buffers():
                return call.division.run(self._number, *inputs)

        assert self._generators is not None
        present = GeneratorStates.current(device)
        self._generators.restore(device)
        try:
            results, _ = call.state.run(run)
        finally:
            present.restore(device)
        if self.is_compared:
            self._compare([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        return results

    def _compare(self, results: Sequence[Tensor]) -> None:
        if differ(zip(self._first, results, strict=True)):
            raise ConfigurationError(
                f"a forward of {type(self._call.division.network).__name__} has given other results when it ran "
                "again for the backward: let its modules keep what they change between calls in attributes, lists "
                "or buffers, and draw random numbers without a generator of their own; or leave out "
                "ActivationCheckpointing"
            )
        self._call.forward.compared.add(self._key)
