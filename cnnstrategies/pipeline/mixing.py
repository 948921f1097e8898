"""Find out whether a stage mixes samples, and how what it stores for a batch follows from what it stores for parts.

A pipeline runs a batch in parts. That is right if each sample has the same result in each batch. A layer that computes
with statistics of a batch, such as a minibatch standard deviation, gives other results for a part of the batch. The
probe runs a stage with a batch and with two parts of the batch, and compares the results. BatchNorm layers use fixed
statistics during the probe, because a pipeline computes their statistics for each microbatch, as documented.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from cnnstrategies._torch_private import OperationMode, put_buffer
from cnnstrategies.pipeline.buffers import is_batch_norm
from cnnstrategies.pipeline.combining import CombiningRule, StoredValues, adds, find_rule, tolerance
from cnnstrategies.pipeline.stored_watch import StoredWatch
from cnnstrategies.pipeline.watched import StoredKey
from cnnstrategies.runtime.generator_states import GeneratorStates

# Arguments of a stage's forward.
Arguments = tuple[Any, ...]


class ProbeResult(NamedTuple):
    """Result of a probe.

    Attributes:
        reason: Why the stage must run the whole batch as one microbatch; None if it may run parts.
        stored: What the stage has stored for the batch, without the values; None if there is a reason.
        rules: The rule of each stored leaf.
        has_rows: For each leaf of the stage's result, whether the leaf has rows for the samples; otherwise it is the
            same in each batch.
    """

    reason: str | None
    stored: StoredValues | None
    rules: list[CombiningRule]
    has_rows: Sequence[bool] = ()


class MixingProbe:
    """Runs a stage several times with a batch and with parts of it. The modules' state does not change.

    Args:
        run: Function that runs the stage.
        modules: The modules that the stage calls, by name, with their submodules.
        watch: Undoes what the forwards store.

    Attributes:
        watch: As given.
    """

    _random: GeneratorStates  # The states at the start of `fixed`.

    def __init__(self, run: Callable[..., Any], modules: Mapping[str, nn.Module], watch: StoredWatch) -> None:
        self._run, self.watch = run, watch
        self._modules = modules

    def verdict(self, arguments: Sequence[Arguments], samples: Sequence[int]) -> ProbeResult | None:
        """Return the result of the probe; None if there are fewer than two samples.

        Args:
            arguments: The stage's arguments for some microbatches.
            samples: Number of samples of each of these microbatches.
        """
        if sum(samples) < 2:
            return None
        if len(samples) > 1:
            parts, counts = [arguments[0], join(arguments[1:], samples[1:])], [samples[0], sum(samples[1:])]
            whole = join(arguments, samples)
        else:
            first = max(1, samples[0] // 3)  # Layers that treat groups of samples may not mix equal parts.
            counts = [first, samples[0] - first]
            whole = arguments[0]
            parts = [rows_of(whole, samples[0], 0, counts[0]), rows_of(whole, samples[0], counts[0], samples[0])]
        with self.fixed():
            return self._compare(whole, parts, counts)

    def additions(self, arguments: Arguments) -> list[CombiningRule]:
        """Return the rules for a whole batch, which only say whether the forward adds to the values that it finds.

        Args:
            arguments: The stage's arguments for the batch.
        """
        with self.fixed():
            _, stored, before, _ = self._forward(arguments)
            values = StoredValues.of(stored)
            again = self._again(arguments, stored)
            columns = zip(values.leaves, values.leaves_of(before), values.leaves_of(again), strict=True)
            return [CombiningRule("same", adds(*column, _limit(column[0]))) for column in columns]

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the stage's modules."""
        parameters = {id(p): p for module in self._modules.values() for p in module.parameters(recurse=False)}
        return [parameter for parameter in parameters.values() if parameter.requires_grad]

    def run(self, arguments: Arguments, needs_gradient: bool) -> tuple[Any, list[Tensor]]:
        """Run the stage once, inside of :meth:`fixed`, with the random numbers of all other runs.

        Args:
            arguments: Arguments of the stage.
            needs_gradient: Whether floating-point tensors in the arguments get gradients.

        Returns:
            The stage's result, and the floating-point tensors in the arguments.
        """
        inputs: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.detach().clone()
            inputs.append(tensor.detach().requires_grad_(needs_gradient))
            return inputs[-1].clone()  # The forward may change its arguments in place.

        self._random.restore()
        with FixedDraws():  # type: ignore[no-untyped-call]
            return self._run(*tree_map_only(Tensor, copy, arguments)), inputs

    @contextmanager
    def fixed(self, has_backward: bool = False) -> Iterator[None]:
        """Return a context for forwards that leave no trace, and in which equal samples have equal results.

        Args:
            has_backward: Whether a backward follows the forwards, so that activations must be kept.
        """
        self._random = GeneratorStates.current()
        with ExitStack() as stack:
            # Users have not asked for these forwards, and a part of the batch may be a single sample.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            # With a backward, no hooks of the user see the saved tensors.
            saved = (_same, _same) if has_backward else (_nothing, _no_tensor)
            stack.enter_context(saved_tensors_hooks(*saved))
            if "torch._dynamo" in sys.modules:  # Otherwise nothing is compiled, and the import would take seconds.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_fixed_statistics(self._modules.values()))
            stack.callback(self._random.restore)
            self.watch.begin()
            stack.callback(self.watch.begin)
            stack.callback(self.watch.take)
            yield

    def _compare(self, whole: Arguments, parts: Sequence[Arguments], samples: Sequence[int]) -> ProbeResult:
        try:
            output, stored, before, inputs = self._forward(whole)
            again = self._again(whole, stored)
            results = [self._forward(part) for part in parts]
        except Exception as error:
            return ProbeResult(f"it cannot run parts of the batch ({type(error).__name__}: {error})", None, [])
        has_rows = _rows_among(output, [result[0] for result in results], samples)
        if has_rows is None:
            return ProbeResult(self._culprit(whole, parts, samples), None, [])
        values = StoredValues.of(stored)
        of_parts = [StoredValues.of(result[1]) for result in results]
        for part in of_parts:
            if not values.has_form_of(part):
                name = values.first_difference(part)
                return ProbeResult(f"it stores other things in {name} for a part of the batch", None, [])
        rules: list[CombiningRule] = []
        columns = [values.names, values.leaves, values.leaves_of(before), values.leaves_of(again)]
        columns += [part.leaves for part in of_parts]
        for key, leaf, old, second, *leaves in zip(*columns, strict=True):
            rule = find_rule(leaf, leaves, samples, old, second, _limit(leaf))
            if rule is None:
                reason = (
                    f"what it stores in {key} for a batch is neither the mean, the sum nor the rows of what it stores "
                    "for parts of the batch"
                )
                return ProbeResult(reason, None, [])
            rules.append(rule._replace(is_certain=rule.kind == "same" and _depends_on_parameters_only(leaf, inputs)))
        return ProbeResult(None, values._replace(leaves=[]), rules, has_rows)

    def _again(self, arguments: Arguments, stored: Mapping[StoredKey, Any]) -> dict[StoredKey, Any]:
        """Return what a forward stores after another forward. It shows which values a forward adds to.

        The forward may use buffers that the first forward has changed. Other values are therefore stored again while
        the buffers have the values from before, and the other way round.

        Args:
            arguments: Arguments of both forwards.
            stored: What the first forward has stored.
        """
        again: dict[StoredKey, Any] = {}
        kept = {key: value for key, value in stored.items() if key.kind in ("set", "values")}
        for is_buffer in (True, False):
            start = {key: value for key, value in kept.items() if ("_buffers" in key.path[:2]) == is_buffer}
            if start:
                results = self._forward(arguments, tree_map(_detached, start))[1]
                again |= {key: value for key, value in results.items() if key in start}
        return again

    def _forward(
        self, arguments: Arguments, start: Mapping[StoredKey, Any] | None = None
    ) -> tuple[Any, dict[StoredKey, Any], dict[StoredKey, Any], list[Tensor]]:
        """Run the stage, and return its output, what it stores, the values before, and its arguments' tensors.

        Args:
            arguments: Arguments of the stage.
            start: Values that are stored before the forward.
        """
        for key, value in (start or {}).items():
            self.watch.change(key, value)
        output, inputs = self.run(arguments, torch.is_grad_enabled())
        stored = self.watch.take()
        return tree_map(_detached, output), stored, dict(self.watch.before), inputs

    def _culprit(self, whole: Arguments, parts: Sequence[Arguments], samples: Sequence[int]) -> str:
        """Return a text that names the first module whose result for a sample depends on the other samples."""
        calls: list[list[tuple[str, Any, Any]]] = []
        handles = []
        for name, module in self._modules.items():

            def note(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                calls[-1].append((name, tree_map(_detached, inputs), tree_map(_detached, output)))

            handles.append(module.register_forward_hook(note))
        try:
            for arguments in (whole, *parts):
                calls.append([])
                self._forward(arguments)
        finally:
            for handle in handles:
                handle.remove()
        for (name, inputs, output), *others in zip(*calls, strict=False):
            # Otherwise code before this call has mixed the samples.
            has_rows = _rows_among(inputs, [call[1] for call in others], samples) is not None
            if has_rows and _rows_among(output, [call[2] for call in others], samples) is None:
                return f"{name} ({type(self._modules[name]).__name__}) gives a sample other results in another batch"
        return "the network's own code gives a sample other results in another batch"


def join(arguments: Sequence[Arguments], samples: Sequence[int]) -> Arguments:
    """Return the arguments of one forward for the samples of several microbatches.

    A tensor that is the same for all microbatches is a constant, such as a table of positions. If all tensors are the
    same, the microbatches have equal samples, and the tensors with rows for them are not constants.
    """
    columns = list(zip(*map(tree_leaves, arguments), strict=True))
    has_equal_samples = all(_are_equal(column) for column in columns if isinstance(column[0], Tensor))

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, Tensor):
            has_rows = first.ndim > 0 and len(first) > 0 and len(first) % samples[0] == 0
            is_constant = _are_equal(leaves) and not (has_equal_samples and has_rows)
            return first if is_constant else torch.cat([leaf.detach() for leaf in leaves])
        is_count = isinstance(first, int) and all(map(int.__eq__, leaves, samples))
        return sum(samples) if is_count else first

    result: Arguments = tree_map(joined, *arguments)
    return result


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape and torch.equal(tensor, tensors[0]) for tensor in tensors)


def rows_of(arguments: Arguments, samples: int, start: int, stop: int) -> Arguments:
    """Return the arguments for some samples of a microbatch."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) and len(leaf) % samples == 0:
            per_sample = len(leaf) // samples
            return leaf[start * per_sample : stop * per_sample]
        return stop - start if type(leaf) is int and leaf == samples else leaf

    result: Arguments = tree_map(part, arguments)
    return result


def _rows_among(whole: Any, parts: Sequence[Any], samples: Sequence[int]) -> list[bool] | None:
    """Return for each leaf of a result whether it consists of the rows for the parts of the batch.

    Returns:
        False for a leaf that is the same for all parts; None if a leaf is neither.
    """
    columns = [tree_leaves(part) for part in parts]
    leaves = tree_leaves(whole)
    if any(len(column) != len(leaves) for column in columns):
        return None
    has_rows = []
    for leaf, *others in zip(leaves, *columns, strict=True):
        rule = find_rule(leaf, others, samples, None, None, _limit(leaf))
        is_count = isinstance(leaf, int) and rule is not None and rule.kind == "sum"
        if (rule is None or rule.kind not in ("same", "rows")) and not is_count:
            return None
        has_rows.append(rule is not None and rule.kind == "rows")
    return has_rows


class FixedDraws(OperationMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by fixed numbers, so that a sample has the same numbers in each batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and overwrite what it has drawn."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(result[1])
        if isinstance(result, Tensor) and result.is_floating_point():
            result.fill_(1.0 if "bernoulli" in str(func.overloadpacket) else 0.5)
        return result


@contextmanager
def _fixed_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which BatchNorm layers normalise with their running statistics, or with 0 and 1."""
    layers: list[Any] = [module for module in modules if is_batch_norm(module)]
    training = [layer for layer in layers if layer.training]
    without = [layer for layer in layers if layer.running_mean is None]
    for layer in training:
        layer.training = False
    for layer in without:
        like = torch.zeros(layer.num_features) if layer.weight is None else layer.weight.detach()
        put_buffer(layer, "running_mean", torch.zeros_like(like))
        put_buffer(layer, "running_var", torch.ones_like(like))
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
        for layer in without:
            put_buffer(layer, "running_mean", None)
            put_buffer(layer, "running_var", None)


def _depends_on_parameters_only(leaf: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether a stored tensor has a gradient for parameters, and does not depend on the stage's inputs."""
    if not (isinstance(leaf, Tensor) and leaf.grad_fn is not None):
        return False
    ids = {id(tensor) for tensor in inputs}
    nodes: list[Any] = [leaf.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in ids:
            return False
        nodes += [following for following, _ in node.next_functions]
    return True


def _limit(leaf: Any) -> float:
    return tolerance(leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else 1e-9


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _nothing(tensor: Tensor) -> None:
    """Keep no activation for a backward pass, because none follows."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _no_tensor(_: None) -> Tensor:
    raise RuntimeError("a probe does not compute gradients")
