"""Values that the forwards of a divided network store, combined for the whole batch, on all ranks.

Each stage combines what its microbatches have stored. A stored tensor lives on the ranks of its stage; all other ranks
get a foreign tensor in the same attribute, and plain values are sent. A stored tensor that requires a gradient is an
output of the network's autograd function, like the network's result.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.channels import TensorHeader, pack
from cnnstrategies.pipeline.combining import CombiningRule, StoredValues, combine, gradient_of_part, is_same
from cnnstrategies.pipeline.first_forward import NotedParameters
from cnnstrategies.pipeline.mixing import MixingProbe, ProbeResult
from cnnstrategies.pipeline.mixing_backward import reason_of_backward
from cnnstrategies.pipeline.noted_state import NotedState
from cnnstrategies.pipeline.stored import StoredWatch
from cnnstrategies.pipeline.watched import PLAIN, StoredKey
from cnnstrategies.placed import Places, RefusedError


class NeedsOneMicrobatchError(Exception):
    """A stage needs the whole batch as one microbatch. All ranks raise this error in the same call.

    Attributes:
        reason: A clause that names the module.
        is_once: Whether the reason holds for this call only.
    """

    def __init__(self, reason: str, is_once: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_once = reason, is_once


class _Report(NamedTuple):
    """Report of a rank about a call, for all other ranks, if it differs from the rank's report of an earlier call.

    Attributes:
        reason: Why the rank's stage needs the whole batch as one microbatch; None if it does not.
        is_once: Whether the reason holds for this call only.
        refusal: Error message for all ranks, if the rank's forwards have done what a pipeline cannot do.
        header: What the stage has stored: for each key its kind, its path, whether the forward has added to the value,
            and the value. Tensors are described.
    """

    reason: str | None
    header: TensorHeader
    is_once: bool = False
    refusal: str | None = None


class StoredTerms:
    """The watch over what this rank's stage stores, and what this rank knows about the other stages.

    Args:
        owner: The user's module, or the network. The watch also finds what a forward stores in the owner's other
            modules.
        network: The divided network.
        modules: The modules that the stage calls, by name, with their submodules.
        run: Function that runs the stage.
        run_again: Function that runs the stage once more for a probe, which BatchNorm layers must not count.
        places: The rules of this rank.
        ranks: For each stage, the ranks of its replicas.
        first_ranks: For each stage, the rank that runs the first microbatch.
        share: Function that copies tensors among the replicas of the stage; see `StageReplicas.share_rows`.
        may_store: Function that returns whether a forward of any stage may store something. It gives the same answer on
            all ranks.
    """

    def __init__(
        self,
        owner: nn.Module,
        network: nn.Module,
        modules: Mapping[str, nn.Module],
        run: Callable[..., Any],
        run_again: Callable[..., Any],
        places: Places,
        ranks: Sequence[tuple[int, ...]],
        first_ranks: Sequence[int],
        share: Callable[[Sequence[Tensor], Sequence[int]], None],
        may_store: Callable[[], bool],
    ) -> None:
        self.watch = StoredWatch(owner, network)
        self.probe = MixingProbe(run_again, modules, self.watch)
        self.run, self.places, self.ranks, self.first_ranks = run, places, ranks, first_ranks
        self.stage = next(stage for stage, members in enumerate(ranks) if places.rank in members)
        self.group = ranks[self.stage]
        self.modules, self.share = modules, share
        self.run_forms: set[Hashable] = set()  # Forms of earlier calls.
        self.known: dict[Hashable, tuple[StoredValues, list[CombiningRule]]] = {}
        self.is_first = True  # Whether no call has ended yet.
        self.reports: dict[int, _Report] = {}
        # Forms of batches in whose first call no stage has stored anything.
        self.without_terms: set[Hashable] = set()
        self.may_store = may_store

    def begin(self, rows: BatchRows, needs_gradient: bool, device: torch.device, form: Hashable) -> "CallTerms":
        """Begin a call of the network.

        Args:
            rows: The rows of the batch that each microbatch contains, also of microbatches of other replicas.
            needs_gradient: Whether the forwards run with autograd.
            device: Device of this rank.
            form: Key that is equal for batches of the same form.
        """
        self.watch.begin()
        return CallTerms(self, rows, needs_gradient, device, (form, rows.sizes))


class CallTerms:
    """Values that one call of the network stores.

    Attributes:
        reason: Why the stage needs the whole batch as one microbatch, if the caller knows a reason.
    """

    def __init__(
        self, terms: StoredTerms, rows: BatchRows, needs_gradient: bool, device: torch.device, form: Hashable
    ) -> None:
        self._terms, self._rows, self._needs_gradient, self._device = terms, rows, needs_gradient, device
        self._sizes = rows.sizes
        self._form = form
        self.reason: str | None = None
        self._arguments: dict[int, tuple[Any, ...]] = {}
        self._stored: dict[int, StoredValues] = {}
        self._before: dict[StoredKey, Any] = {}
        self._rules: list[CombiningRule] = []
        # The combined tensors that this stage reports, and for those with a gradient the index of the stored leaf.
        self._tensors: list[Tensor] = []
        self._with_gradient: list[int] = []
        # Tensors of this stage that the forwards have changed in place, with the values of the whole batch.
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._headers: list[TensorHeader] = []
        self._ran: list[int] = []  # This rank's microbatches.
        self._has_parts = not rows.is_one_microbatch
        # Layers may set their parameters in their first forward.
        self._noted = NotedParameters(terms.modules) if terms.is_first else None
        self._changed_parameter: str | None = None
        self._of_backward = StoredValues.of({})
        self._without_graph: set[int] = set()
        self._keeps_arguments = True

    def noted_state(self) -> NotedState:
        """Return the state of modules in which the call's forwards begin."""
        return self._terms.watch.noted()

    def run(self, microbatch: int, arguments: tuple[Any, ...]) -> Any:
        """Run the stage for a microbatch, and take away what it stores.

        Args:
            microbatch: The microbatch.
            arguments: Arguments of the stage.
        """
        watch, terms = self._terms.watch, self._terms
        is_new = self._form not in terms.run_forms
        saving = watch.saving_copies(is_new) if self._needs_gradient else nullcontext()
        with saving, nullcontext() if self._noted is None else self._noted.watching():
            result = terms.run(*arguments)
        if self._noted is not None and (changed := self._noted.changed()):
            self._changed_parameter = changed[0]
            if self._has_parts:
                self._noted.restore()
        self._ran.append(microbatch)
        self._stored[microbatch] = StoredValues.of(watch.take())
        self._before |= watch.before
        if self._keeps_arguments:
            self._arguments[microbatch] = arguments
        return result

    def drop_arguments(self) -> None:
        """Keep no arguments of the stage, if the rules by which stored values are combined are known."""
        self._keeps_arguments = self._form not in self._terms.known

    def begin_watch(self) -> None:
        """Note the current state of modules, to which :meth:`undo` returns."""
        self._terms.watch.begin()

    def undo(self) -> None:
        """Undo what code has stored on modules since the last forward."""
        self._terms.watch.take()

    def outside_network(self) -> list[nn.Module]:
        """Return the modules of the user's module that are not in the network."""
        return self._terms.watch.outside_network()

    def drop_graph(self, microbatch: int) -> None:
        """Drop the graph of what a microbatch has stored. Its forward then has to run again for the backward."""
        self._stored[microbatch] = self._stored[microbatch].detached().attached(self._device)
        self._without_graph.add(microbatch)

    def finish(self) -> None:
        """Combine what the microbatches have stored, and tell the other ranks. All ranks must call this.

        Raises:
            NeedsOneMicrobatchError: A stage mixes samples, or what it stores cannot be combined.
        """
        terms, places = self._terms, self._terms.places
        refusal = terms.watch.new_modules()
        if self._form in terms.without_terms and not terms.may_store():
            self._arguments.clear()
            self._noted = None
            self._check_nothing(refusal)
            return
        with torch.set_grad_enabled(self._needs_gradient):
            reason = self._find_rules()
        terms.run_forms.add(self._form)
        reason = self.reason or reason
        if self._noted is not None and (name := self._noted.changed_unseen()) is not None:
            refusal = refusal or (
                f"the network's first forward changes {name} without an operation of torch, for example through NumPy: "
                "use operations of torch, or set the parameter before training"
            )
        set_first = self._share_parameters()
        self._arguments.clear()
        report = _Report(set_first or reason, _NOTHING, set_first is not None, refusal)
        if set_first is not None:
            reason = set_first
        if reason is None and refusal is None and self._stored:
            report = _Report(None, self._combine())
        news = None if report == terms.reports.get(places.rank) else report
        for rank, received in enumerate(places.exchange(news, range(places.world_size), "stored")):
            if received is not None:
                terms.reports[rank] = _Report(*received)
        refusals = [report.refusal for _, report in sorted(terms.reports.items()) if report.refusal is not None]
        if refusals:
            raise ConfigurationError(refusals[0])
        reports = [terms.reports[rank] for rank in terms.first_ranks]
        for stage_report in reports:
            if stage_report.reason is not None:
                terms.reports.clear()
                raise NeedsOneMicrobatchError(stage_report.reason, stage_report.is_once)
        terms.is_first, self._noted = False, None
        with torch.no_grad():
            for tensor, values in self._changed:
                tensor.copy_(values)
        self._headers = [stage_report.header for stage_report in reports]
        for microbatch in self._without_graph:
            self._stored[microbatch] = self._stored[microbatch]._replace(leaves=[])
        if all(report == _Report(None, _NOTHING) for report in terms.reports.values()):
            terms.without_terms.add(self._form)

    def _check_nothing(self, refusal: str | None) -> None:
        """Check that a call whose forwards cannot store anything has not stored anything.

        Args:
            refusal: See `StoredWatch.new_modules`.

        Raises:
            ConfigurationError: A forward has created modules or parameters.
            RefusedError: A forward has stored something else.
        """
        if refusal is not None:
            raise ConfigurationError(refusal)
        if self.reason is not None:
            raise RefusedError(f"{self.reason}, unlike for earlier batches of the same shapes: use one microbatch")
        key = next((key for values in self._stored.values() for key in values.keys), None)
        if key is not None:
            raise RefusedError(
                f"a forward has stored a value in {key}, which the code of the network's modules does not show: store "
                "values by an assignment to an attribute in the module's forward or in a forward hook"
            )

    def outputs(self) -> list[Tensor]:
        """Return the stored tensors of all stages that have a gradient: placed tensors, or foreign ones."""
        return [tensor for stage in range(len(self._headers)) for tensor, needed in self._placed(stage) if needed]

    def place(self, outputs: Sequence[Tensor]) -> None:
        """Store all stages' values in the attributes of this rank's modules.

        Args:
            outputs: The tensors of :meth:`outputs`, as results of the network's autograd function.
        """
        watch, remaining = self._terms.watch, iter(outputs)
        before: dict[tuple[Any, ...], Any] = {}
        for stage, header in enumerate(self._headers):
            if not header.leaves:
                continue
            (entries,) = header.unpack(
                [next(remaining) if needed else tensor for tensor, needed in self._placed(stage)]
            )
            for kind, path, accumulates, value in entries:
                key = StoredKey(kind, path)
                if key.is_outside:
                    # The value may be a cache, which the forwards of other stages use.
                    value = self._with_copies(value)
                if kind in ("set", "values"):
                    present = watch.value(key)
                    if path in before and accumulates is not False:
                        # An earlier stage has changed the same value.
                        if accumulates is None:
                            raise ConfigurationError(
                                f"forwards in several stages change {key}, and each of them uses the value that it "
                                "finds: store the value of each module in an attribute of its own"
                            )
                        value = present + (value - (before[path] or 0))
                    before.setdefault(path, present)
                watch.put(key, value)

    def _with_copies(self, value: Any) -> Any:
        """Return a value of which all ranks have copies, except for tensors with a gradient."""
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.requires_grad]
        copies = self._terms.places.all_everywhere(leaves, "a stored value")
        return tree_map(lambda leaf: copies.get(id(leaf), leaf), value)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for the backwards of this rank's microbatches, which takes away what hooks store.

        Raises:
            RefusedError: A hook has stored a value, and the batch is not one microbatch.
        """
        watch = self._terms.watch
        watch.begin()
        yield
        self._of_backward = StoredValues.of(watch.take())
        if self._of_backward.keys and self._has_parts:
            raise RefusedError(
                f"a hook has stored {self._of_backward.keys[0]} in the backward of a part of the batch, which is not "
                "what it would store for the whole batch: set the strategy's microbatches to 1, or store the value in "
                "the first step, so that the network runs batches as one microbatch"
            )

    @property
    def stores_in_backward(self) -> bool:
        """Whether hooks have stored values in the backwards of this rank's microbatches."""
        return bool(self._of_backward.keys)

    def place_of_backward(self) -> None:
        """Store what the stages' backwards have stored in the attributes of this rank's modules.

        All ranks must call this, if :attr:`stores_in_backward` is true on a rank. The batch is one microbatch.
        """
        terms = CallTerms(self._terms, self._rows, False, self._device, self._form)
        terms._before = dict(self._terms.watch.before)
        terms._stored = dict.fromkeys(self._ran, self._of_backward)
        terms.finish()
        terms.place(terms.outputs())

    def own_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring the gradients of :meth:`outputs` to their stages. All ranks must call this.

        Returns:
            The gradients of this rank's stage.
        """
        places, remaining = self._terms.places, iter(gradients)
        result: list[Tensor | None] = []
        for stage, header in enumerate(self._headers):
            count = sum(spec.needs_gradient for spec in header.tensors)
            of_stage = [next(remaining) for _ in range(count)]
            present = [gradient for gradient in of_stage if gradient is not None]
            brought = places.bring_all(present, self._terms.ranks[stage], "gradients of stored values")
            if stage == self._terms.stage:
                result = [None if gradient is None else brought.get(id(gradient), gradient) for gradient in of_stage]
        return result

    def roots(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        keep: bool,
        second: StoredValues | None = None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return a microbatch's stored tensors with their gradients.

        Args:
            microbatch: The microbatch.
            gradients: Result of :meth:`own_gradients`.
            keep: Whether the tensors are needed again.
            second: What the microbatch's second forward has stored, if there was one.

        Raises:
            ConfigurationError: The second forward has stored other things than the first.
        """
        stored = self._stored[microbatch] if keep else self._stored.pop(microbatch)
        if second is not None and not second.has_form_of(stored) and any(start is not None for start in gradients):
            names = {*map(str, stored.keys)} ^ {*map(str, second.keys)} or {*map(str, stored.keys)}
            raise ConfigurationError(
                f"a forward that ran again for the backward has stored something else in {min(names)} than at first: "
                "let it store the same in each call, or set activation_checkpointing to never"
            )
        leaves = (stored if second is None else second).leaves
        tensors, starts = [], []
        for index, gradient in zip(self._with_gradient, gradients, strict=True):
            if gradient is not None:
                tensors.append(leaves[index])
                starts.append(gradient_of_part(self._rules[index], gradient, self._rows, microbatch))
        return tensors, starts

    def _find_rules(self) -> str | None:
        """Find the rules by which the microbatches' values are combined, together with the stage's other replicas.

        Returns:
            Why the stage needs the whole batch as one microbatch; None if it does not.
        """
        terms = self._terms
        self._share()
        if sum(map(bool, self._sizes)) < 2:
            self._rules = self._additions()
            return None
        known = terms.known.get(self._form)
        if known is not None and self._fits(*known):
            self._rules = known[1]
            return None
        if not self._keeps_arguments:
            return "it stores other things than in an earlier batch of the same shapes"
        arguments, samples = list(self._arguments.values()), [self._sizes[m] for m in self._arguments]
        verdict = terms.probe.verdict(arguments, samples)
        if verdict is not None and verdict.reason is None and self._needs_gradient:
            reason = reason_of_backward(terms.probe, arguments, samples, verdict.has_rows)
            verdict = verdict if reason is None else ProbeResult(reason, None, [])
        if len(terms.group) > 1:
            verdicts = [v for v in terms.places.exchange(verdict, terms.group, "probe") if v is not None]
            verdict = next((v for v in verdicts if v.reason is not None), verdicts[0] if verdicts else None)
        if verdict is None:
            stored = next((key for values in self._stored.values() for key in values.keys), None)
            return None if stored is None else f"it stores {stored}, and there are too few samples to find out how"
        if verdict.stored is None:
            return verdict.reason
        terms.known[self._form] = verdict.stored, verdict.rules
        self._rules = verdict.rules
        fits = self._fits(verdict.stored, verdict.rules)
        return None if fits else "it stores different things in different microbatches"

    def _share_parameters(self) -> str | None:
        """Give all replicas of the stage the parameters that a forward has set.

        Returns:
            Why the stage needs the whole batch as one microbatch; None if it does not.
        """
        if self._noted is None:
            return None
        names = [self._changed_parameter]
        if len(self._terms.group) > 1:
            names = self._terms.places.exchange(self._changed_parameter, self._terms.group, "parameters")
        name = next((name for name in names if name is not None), None)
        if name is None:
            return None
        if self._has_parts:
            return f"its first forward sets {name}"
        self._terms.share(self._noted.tensors(), self._sizes)
        return None

    def _additions(self) -> list[CombiningRule]:
        """Return the rules of a batch that is one microbatch."""
        terms = self._terms
        (values,) = self._stored.values()
        if not self._arguments or not values.keys or self._changed_parameter is not None:
            return [CombiningRule("same")] * len(values.leaves)
        known = terms.known.get(self._form)
        if known is None or not values.has_form_of(known[0]):
            (arguments,) = self._arguments.values()
            known = terms.known[self._form] = values._replace(leaves=[]), terms.probe.additions(arguments)
        return known[1]

    def _share(self) -> None:
        """Get what the microbatches of the stage's other replicas have stored."""
        terms = self._terms
        if len(terms.group) == 1:
            return
        stored = {microbatch: values.detached() for microbatch, values in self._stored.items() if values.keys}
        for others, before in terms.places.exchange(
            (stored, list(self._before.items())), terms.group, "stored by replicas"
        ):
            self._before = {**dict(before), **self._before}
            for microbatch, values in others.items():
                self._stored.setdefault(microbatch, values.attached(self._device))
        nothing = StoredValues.of({})
        for microbatch, size in enumerate(self._sizes):
            if size:
                self._stored.setdefault(microbatch, nothing)

    def _fits(self, known: StoredValues, rules: Sequence[CombiningRule]) -> bool:
        """Whether the microbatches have stored values that the rules can combine."""
        if not all(values.has_form_of(known) for values in self._stored.values()):
            return False
        columns = zip(*(values.leaves for values in self._stored.values()), strict=True)
        return all(
            rule.kind != "same" or rule.is_certain or all(is_same(leaf, other) for other in others)
            for rule, (leaf, *others) in zip(rules, columns, strict=True)
        )

    def _combine(self) -> TensorHeader:
        """Combine the microbatches' values. Return the header of what the other ranks must know."""
        places, watch, table = self._terms.places, self._terms.watch, self._stored
        order = sorted(table)
        samples = [self._sizes[microbatch] for microbatch in order]
        values = table[order[0]]
        before = values.leaves_of(self._before)
        columns = list(zip(*(table[microbatch].leaves for microbatch in order), strict=True))
        needs: list[bool] = []
        leaves: list[Any] = []
        with torch.no_grad():
            for rule, column, old in zip(self._rules, columns, before, strict=True):
                leaf = combine(rule, column, samples, old)
                leaf = self._rows.in_order(leaf) if rule.kind == "rows" else leaf
                needs.append(any(isinstance(part, Tensor) and part.requires_grad for part in column))
                # A tensor with a storage of its own can have a place of its own.
                leaves.append(leaf.clone().requires_grad_(needs[-1]) if isinstance(leaf, Tensor) else leaf)
        entries = []
        indices = values.by_key(range(len(leaves)))
        for key, tree, of_key in zip(values.keys, values.trees, indices, strict=True):
            value = tree_unflatten([leaves[index] for index in of_key], tree)
            _check(key, [leaves[index] for index in of_key])
            if key.kind == "values" and not any(needs[index] for index in of_key):
                tensor = watch.find(key.path)
                if places.place_of(tensor) is not None:
                    # The tensor lives on this stage's ranks, like the network's buffers.
                    self._changed.append((tensor, value))
                    continue
            accumulates = self._rules[of_key[0]].accumulates if len(of_key) == 1 else False
            entries.append((key.kind, key.path, accumulates, value))
            self._with_gradient += [index for index in of_key if needs[index]]
        header, self._tensors = pack((entries,), False) if entries else (_NOTHING, [])
        return header

    def _placed(self, stage: int) -> list[tuple[Tensor, bool]]:
        """Return the stored tensors of a stage, foreign on other ranks, and whether each has a gradient."""
        places, ranks = self._terms.places, self._terms.ranks[stage]
        specs = self._headers[stage].tensors
        if places.rank in ranks:
            tensors = [places.mark(tensor.detach(), ranks, "a stored value") for tensor in self._tensors]
        else:
            with places.local():
                shapes = [spec.empty(torch.device("meta")) for spec in specs]
                tensors = [places.foreign_like(shape, ranks, "a stored value", self._device) for shape in shapes]
        return [(tensor, spec.needs_gradient) for tensor, spec in zip(tensors, specs, strict=True)]


def _check(key: StoredKey, leaves: Sequence[Any]) -> None:
    """Check that other ranks can get what has been stored.

    Raises:
        ConfigurationError: They cannot.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ConfigurationError(
                f"the network's forward stores an object of the class {type(leaf).__name__} in {key}, which the ranks "
                "of other stages cannot get: store tensors, numbers or texts, or lists and dictionaries of them"
            )


_NOTHING = pack((), False)[0]
