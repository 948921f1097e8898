"""Values that the forwards of a divided network store, during one call of the network and across calls.

Each stage takes away what its microbatches store, combines it by rules that it has found, and tells the other ranks. A
stored tensor that requires a gradient is an output of the network's autograd function, like the network's result.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import hooks_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.batch_terms import NOTHING, BatchTerms, CombinedTerms, combine_terms
from cnnstrategies.pipeline.combining import NO_VALUES, StoredValues
from cnnstrategies.pipeline.first_forward import NotedParameters
from cnnstrategies.pipeline.microbatch_terms import MicrobatchTerms
from cnnstrategies.pipeline.mixing import MixingProbe
from cnnstrategies.pipeline.stored_watch import StoredWatch, WatchState
from cnnstrategies.pipeline.term_reports import TermReport, TermReports
from cnnstrategies.pipeline.term_rules import TermRules
from cnnstrategies.pipeline.watched import StoredKey
from cnnstrategies.placed import Places, RefusedError

if TYPE_CHECKING:
    from cnnstrategies.pipeline.stage_runner import StageRunner

_OF_NEW_HOOKS = (
    "stored values: this rank has a hook that stores values and was registered outside of training, and all ranks must "
    "register such a hook"
)


def code_of(hook: Any) -> Any:
    """Return an object that is the same for hooks that are registered anew in each step."""
    function = getattr(hook, "func", hook)
    return getattr(function, "__code__", type(function))


class StoredTerms:
    """The watch over what this rank's stage stores, and what this rank knows about the other stages.

    Args:
        runner: Runs this rank's stage.
        owner: The user's module, or the network. The watch also finds what a forward stores in the owner's other
            modules.
        places: The rules of this rank.
        ranks: For each stage, the ranks of its replicas.

    Attributes:
        loss_stores: Whether the declared loss has stored something, so that forwards are watched one by one.
    """

    def __init__(
        self, runner: "StageRunner", owner: nn.Module, places: Places, ranks: Sequence[tuple[int, ...]]
    ) -> None:
        self._network = network = runner.division.network
        self.watch = StoredWatch(owner, network)
        self.runner, self.places, self.ranks = runner, places, ranks
        self.group = next(members for members in ranks if places.rank in members)
        # The modules that the stage calls, by name, with their submodules.
        self.modules = {
            path: module
            for node in runner.division.graphs()[runner.stage].graph.nodes
            if node.op == "call_module"
            for path, module in network.get_submodule(str(node.target)).named_modules(prefix=str(node.target))
        }
        self.rules = TermRules(MixingProbe(runner.run_for_probe, self.modules, self.watch), places, self.group)
        self.run_forms: set[Hashable] = set()  # Forms of earlier calls.
        self.is_first = True  # Whether no call has ended yet.
        self.reports = TermReports(places)
        # Forms of batches in whose first call no stage has stored anything.
        self.without_terms: set[Hashable] = set()
        self.loss_stores = False
        self._known_state: object = None
        self._hooks: Hashable = ()
        # By the form of a batch, and by the hooks of the network: the form under which this rank remembers its calls.
        self.known_hooks: dict[Hashable, dict[Hashable, Hashable]] = {}

    def begin(self, rows: BatchRows, needs_gradient: bool, form: Hashable) -> "CallTerms":
        """Begin a call of the network.

        Args:
            rows: The rows of the batch that each microbatch contains, also of microbatches of other replicas.
            needs_gradient: Whether the forwards run with autograd.
            form: Key that is equal for batches of the same form.
        """
        return CallTerms(self, rows, needs_gradient, (form, rows.sizes), self.watch.begin())

    def hooks(self, state: WatchState) -> Hashable:
        """Return a key of the hooks on all modules of the network, which may differ between ranks.

        Args:
            state: The state of the network.
        """
        if self._known_state is not state:
            modules = enumerate(self._network.modules())
            self._hooks = tuple((index, code_of(hook)) for index, module in modules for hook in hooks_of(module))
            self._known_state = state
        return self._hooks


class CallTerms:
    """Values that one call of the network stores.

    Attributes:
        watch: Finds what code has stored on modules since the last forward, and undoes it.
        reason: Why the stage needs the whole batch as one microbatch, if the caller knows a reason.
        is_quiet: Whether no forward stores anything, as far as all ranks know from the code and from earlier calls. The
            forwards are then watched together, and not one by one.
        have_changed: Whether backwards that ran between the forwards of any rank give gradients to other tensors than
            in earlier calls, after :meth:`finish`.
    """

    have_changed = False

    def __init__(
        self, terms: StoredTerms, rows: BatchRows, needs_gradient: bool, form: Hashable, state: WatchState
    ) -> None:
        self._state, self.watch = state, terms.watch
        self._terms, self._rows, self._needs_gradient = terms, rows, needs_gradient
        self._device = terms.runner.transport.device
        self._hooks, self._known_hooks = terms.hooks(state), terms.known_hooks.setdefault(form, {})
        if not self._known_hooks:
            self._known_hooks[self._hooks] = form
        self._base = form
        self._form = self._known_hooks.get(self._hooks, form)
        self._has_new_hooks = self._hooks not in self._known_hooks
        self.reason: str | None = None
        self._microbatches = MicrobatchTerms(rows)
        self._ran: list[int] = []  # This rank's microbatches.
        self._combined = CombinedTerms(NOTHING, [], [], [])  # Values of this stage for the whole batch.
        self._batch = BatchTerms([], [], terms.places, terms.ranks, self._device)  # Values of all stages.
        # Layers may set their parameters in their first forward.
        self._noted = NotedParameters(terms.modules) if terms.is_first else None
        self._changed_parameter: str | None = None
        has_run = self._form in terms.run_forms and self._form in terms.without_terms
        self.is_quiet = has_run and not (terms.is_first or self._has_new_hooks or terms.runner.may_store(state))
        self._of_backward = NO_VALUES

    # The forwards

    def run(self, microbatch: int, arguments: tuple[Any, ...]) -> Any:
        """Run the stage for a microbatch, and take away what it stores.

        Args:
            microbatch: The microbatch.
            arguments: Arguments of the stage.
        """
        watch, terms = self.watch, self._terms
        is_new = self._has_new_hooks or self._form not in terms.run_forms
        saving = watch.saving_copies(is_new) if self._needs_gradient else nullcontext()
        with saving, nullcontext() if self._noted is None else self._noted.watching():
            result = terms.runner.run_stage(*arguments)
        if self._noted is not None and (changed := self._noted.changed()):
            self._changed_parameter = changed[0]
            if not self._rows.is_one_microbatch:
                self._noted.restore()
        self._ran.append(microbatch)
        if self.is_quiet:
            self._microbatches.add(microbatch, NO_VALUES, {}, arguments)
        else:
            self._microbatches.add(microbatch, StoredValues.of(watch.take()), watch.before, arguments)
            if len(self._ran) == 1 and watch.state is self._state:
                with torch.set_grad_enabled(self._needs_gradient):
                    has_run = terms.rules.begin(self._microbatches, self._form, self._needs_gradient)
                if has_run:  # The probe has noted modules while BatchNorm layers used fixed statistics.
                    self._state = watch.begin()
        return result

    def drop_arguments(self) -> None:
        """Keep no arguments of the stage, if the rules by which stored values are combined are known."""
        self._microbatches.keeps_arguments = self._has_new_hooks or not self._terms.rules.are_known(self._form)

    def drop_graph(self, microbatch: int) -> None:
        """Drop the graph of what a microbatch has stored. Its forward then has to run again for the backward."""
        self._microbatches.drop_graph(microbatch, self._device)

    def undo(self) -> None:
        """Undo what the declared loss has stored on modules since the last forward."""
        if self.watch.take():
            # Quiet forwards have not been watched until now. The next one that stores something is noticed.
            self._terms.loss_stores, self.is_quiet = True, False

    @property
    def loss_stores(self) -> bool:
        """Whether the declared loss has stored something in this call or in an earlier one."""
        return self._terms.loss_stores

    # After the forwards

    def finish(self, has_changed: bool = False) -> None:
        """Combine what the microbatches have stored, and tell the other ranks. All ranks must call this.

        Args:
            has_changed: Value of this rank for :attr:`have_changed`, which needs no message of its own.

        Raises:
            NeedsOneMicrobatchError: A stage mixes samples, or what it stores cannot be combined.
            RefusedError: A hook that was registered after the first call, and not on all ranks, mixes samples.
        """
        terms, places, microbatches = self._terms, self._terms.places, self._microbatches
        state = self.watch.state
        refusal = None if state is self._state else self.watch.new_modules()
        unseen = next(iter(self.watch.take()), None) if self.is_quiet and state is not self._state else None
        is_exchanged = self._agree_on_terms(state, has_changed)
        self._refuse(unseen)
        if not is_exchanged:
            microbatches.arguments.clear()
            self._noted = None
            self._check_nothing(refusal)
            return
        # Without a backward, ranks do not ask each other whether they have new hooks.
        is_alone = self._has_new_hooks and not self._needs_gradient
        with torch.set_grad_enabled(self._needs_gradient):
            subject = _OF_NEW_HOOKS if is_alone else "stored by replicas"
            microbatches.share(places, terms.group, self._device, subject)
            sets_parameters = self._changed_parameter is not None
            rules, reason = terms.rules.find(microbatches, self._form, self._needs_gradient, sets_parameters)
        terms.run_forms.add(self._form)
        reason = self.reason or reason
        if self._noted is not None and (name := self._noted.changed_unseen()) is not None:
            refusal = refusal or (
                f"the network's first forward changes {name} without an operation of torch, for example through NumPy: "
                "use operations of torch, or set the parameter before training"
            )
        set_first = self._share_parameters()
        microbatches.arguments.clear()
        report = TermReport(set_first or reason, NOTHING, set_first is not None, refusal)
        if report.reason is None and refusal is None and microbatches.stored:
            self._combined = combine_terms(microbatches, rules, self.watch, places)
            report = TermReport(None, self._combined.header)
        headers = terms.reports.exchange(report, terms.runner.first_ranks, _OF_NEW_HOOKS if is_alone else "stored")
        terms.is_first, self._noted = False, None
        with torch.no_grad():
            for tensor, values in self._combined.changed:
                tensor.copy_(values)
        self._batch = BatchTerms(headers, self._combined.tensors, places, terms.ranks, self._device)
        microbatches.drop_copies()
        if terms.reports.are_empty:
            terms.without_terms.add(self._form)

    def _agree_on_terms(self, state: WatchState, has_changed: bool) -> bool:
        """Return whether the ranks exchange what they have stored. All ranks return the same.

        If all ranks have new hooks since earlier calls with this form, the call counts as the first call with another
        form. Hooks that only some ranks have are a matter of these ranks.

        Args:
            state: The state of the network after the forwards.
            has_changed: See :meth:`finish`.
        """
        terms, places = self._terms, self._terms.places
        # Without a backward, later calls may begin before this call ends on other ranks, so there is no exchange.
        everyone = range(places.world_size) if self._needs_gradient else (places.rank,)
        is_empty = self._form in terms.without_terms
        facts = places.exchange(
            (has_changed, self._has_new_hooks, is_empty, terms.runner.may_store(state)), everyone, "hooks"
        )
        self.have_changed = any(changed for changed, *_ in facts)
        if self._has_new_hooks:
            if len(facts) == places.world_size and all(has_new for _, has_new, *_ in facts):
                self._form = self._base, self._hooks
            elif not self._rows.is_one_microbatch and self._microbatches.arguments:
                self._check_own_hooks()
            self._known_hooks[self._hooks] = self._form
        is_known = all(is_empty for *_, is_empty, _ in facts) and self._form in terms.without_terms
        return not is_known or any(may_store for *_, may_store in facts)

    def _check_own_hooks(self) -> None:
        """Check that hooks which only some ranks have registered after the first call do not mix samples."""
        with torch.set_grad_enabled(self._needs_gradient):
            verdict = self._terms.rules.own_verdict(self._microbatches, self._needs_gradient)
        if verdict is not None and verdict.reason is not None:
            raise RefusedError(
                f"with a hook that was registered after the first step, and not on all ranks, a stage needs the whole "
                f"batch ({verdict.reason}): register the hook on all ranks, or set the strategy's microbatches to 1"
            )

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
        self._refuse(self._microbatches.first_key)

    def _refuse(self, key: StoredKey | None) -> None:
        """Raise an error if a forward has stored something that its code does not show."""
        if key is not None:
            raise RefusedError(
                f"a forward has stored a value in {key}, which the code of the network's modules does not show: store "
                "values by an assignment to an attribute in the module's forward or in a forward hook"
            )

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
        if not self._rows.is_one_microbatch:
            return f"its first forward sets {name}"
        self._terms.runner.replicas.share_rows(self._noted.tensors(), self._rows.sizes)
        return None

    def outputs(self) -> list[Tensor]:
        """Return the stored tensors of all stages that have a gradient: placed tensors, or foreign ones."""
        return self._batch.outputs()

    def place(self, outputs: Sequence[Tensor]) -> None:
        """Store all stages' values in the attributes of this rank's modules.

        Args:
            outputs: The tensors of :meth:`outputs`, as results of the network's autograd function.
        """
        self._batch.store(outputs, self.watch)

    # The backwards

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for the backwards of this rank's microbatches, which takes away what hooks store.

        Raises:
            RefusedError: A hook has stored a value, and the batch is not one microbatch.
        """
        self.watch.begin()
        yield
        self._of_backward = StoredValues.of(self.watch.take())
        if self._of_backward.keys and not self._rows.is_one_microbatch:
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
        terms = CallTerms(self._terms, self._rows, False, self._form, self.watch.state)
        terms.is_quiet = False
        terms._microbatches.before = dict(self.watch.before)
        terms._microbatches.stored = dict.fromkeys(self._ran, self._of_backward)
        terms.finish()
        terms.place(terms.outputs())

    def own_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring the gradients of :meth:`outputs` to their stages. All ranks must call this.

        Returns:
            The gradients of this rank's stage.
        """
        return self._batch.own_gradients(gradients)

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
        return self._microbatches.roots(microbatch, gradients, self._combined.roots, keep, second)
