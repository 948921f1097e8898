"""One call of a network whose values have places: an autograd function that runs on all ranks."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cnnstrategies._torch_private import has_tensor_hooks, keeps_graph, without_functions
from cnnstrategies.pipeline.batch_terms import foreign_tensors
from cnnstrategies.pipeline.call_sums import CallSums
from cnnstrategies.pipeline.declared_loss import LossOfCall
from cnnstrategies.pipeline.double_backward import autocast_states, gradients_with_graph
from cnnstrategies.pipeline.interleaved_batch import InterleavedBatch, Interleaving
from cnnstrategies.pipeline.known_forms import BackwardReport, ForwardReport, KnownForm, Used
from cnnstrategies.pipeline.loss_verdict import judge
from cnnstrategies.pipeline.part_gradients import multiply_gradients
from cnnstrategies.pipeline.random_draws import PassedStates, advance
from cnnstrategies.pipeline.ready_order import in_order
from cnnstrategies.pipeline.stored_terms import CallTerms
from cnnstrategies.pipeline.tensor_headers import TensorHeader
from cnnstrategies.pipeline.whole_batch import CallArguments, WholeBatch, tensors_in
from cnnstrategies.placed.messages import RefusedError

if TYPE_CHECKING:
    from cnnstrategies.pipeline.placed_network import PlacedNetwork


class PlacedCall:
    """One call of a network: its arguments, and what its backward needs.

    Args:
        network: The network.
        images: Nested containers of tensors with one row per sample.
        parameters: By name, the parameters that are arguments of the autograd function.
        form: Key of the batch's form; see `PlacedNetwork.form_of`.

    Attributes:
        header: Header of the network's result, after :meth:`run`.
        autocast: For each type of device, whether autocast was on, and its dtype.
    """

    header: TensorHeader
    _form: KnownForm  # After `run`.
    _batch: WholeBatch  # After `run`. A backward may run the forwards again, as another one.

    def __init__(
        self, network: "PlacedNetwork", images: Any, parameters: Mapping[str, nn.Parameter], form: Hashable
    ) -> None:
        self.network, self.images, self.parameters = network, images, parameters
        self.places = network.places
        self.first, self.last = network.ranks[0], network.ranks[-1]
        # The rank that computes the first rows of the network's result.
        self._first_of_last = network.runner.placement.rank_of(len(network.ranks) - 1, 0)
        # Without this condition, a frozen network would hold its activations for a backward that never comes.
        has_inputs = bool(parameters) or any(leaf.requires_grad for leaf in tensors_in(images))
        self.needs_gradient = torch.is_grad_enabled() and has_inputs
        network.calls += self.needs_gradient
        self.autocast = autocast_states()
        self._key = form
        self._results: tuple[Tensor, ...] = ()
        self._sums = CallSums(network, parameters)
        # The declared loss for this call; None outside of training steps.
        self._loss: LossOfCall | None = None
        self._has_compared = False  # Whether a backward has compared its gradients with those of the declared loss.
        self._expected: Used | None = None  # What backwards between the forwards should give a gradient to.
        self._outputs: list[Tensor] = []  # The network's result, if the backward computes the declared loss from it.

    def run(self) -> list[Tensor]:
        """Run the forwards. Return the tensors of the network's result, and what the forwards have stored.

        All ranks must call this.
        """
        with torch.no_grad():
            self._results = self._forward()
        with without_functions():
            has_hooks = any(map(has_tensor_hooks, self.parameters.values()))
        inputs = in_order(self.parameters, self._form.order if has_hooks else ())
        tensors: list[Tensor] = NetworkFunction.apply(self, *tensors_in(self.images), *inputs.values())
        return tensors

    def results(self) -> tuple[Tensor, ...]:
        """Return the results of the forwards, and forget them."""
        results, self._results = self._results, ()
        return results

    def _forward(self) -> tuple[Tensor, ...]:
        """Run the forwards, and return the tensors of the network's result.

        Raises:
            RefusedError: The images have no samples.
        """
        places, runner, leaves = self.places, self.network.runner, tensors_in(self.images)
        if not leaves or not leaves[0].shape[:1].numel():
            raise RefusedError(
                f"the network is called with {[tuple(leaf.shape) for leaf in leaves]}, which has no samples: call the "
                "divided network only if the batch has samples"
            )
        if places.sums.waiting and self.network.may_read_gradients():
            places.sums.settle()  # The stage's code does not follow the rules.
        brought = places.bring_all(leaves, self.first, "images")
        form = self.network.forms.get(self._key)
        declared, samples = self.network.declared, len(leaves[0])
        loss = self._loss = declared.begin(samples) if declared is not None and self.needs_gradient else None
        interleaving = None
        if loss is not None and loss.expected is not None and self.network.can_interleave(self._key, samples):
            loss.prepare()
            interleaving, runner.early = Interleaving(loss.gradients, self._has_changed), self._sums.begin(form)
            self._expected = None if form is None else form.newest
        # All calls in GPipe's order must do with the memory of the order 1F1B.
        checkpointing = self.network.other_checkpointing if self.needs_gradient else None
        with places.local():
            for leaf in leaves:
                if id(leaf) in brought:
                    brought[id(leaf)].requires_grad_(leaf.requires_grad)
            images = tree_map(lambda leaf: brought.get(id(leaf), leaf), self.images)
            # A layer may begin to draw later, as a dropout whose probability grows.
            in_order = form is None or self.needs_gradient or bool(form.drawn)
            call = CallArguments(images, samples, self.needs_gradient, self._key, in_order, checkpointing)
            batch = self.network.begin(call, interleaving)
        self._batch = batch
        names = [name for name in self.parameters if self.network.division.owner[name] == runner.stage]
        order = [names[index] for index in runner.ready_orders.get(self._key, ())]
        report = ForwardReport(batch.header, sorted(batch.draws.drawn), order)
        if form is None or form.varies:
            reports = places.exchange(report, range(places.world_size), "forms")
            header = reports[self._first_of_last].header
            assert header is not None
            form = self.network.forms.setdefault(self._key, KnownForm(header))
            form.learn_forward(header, reports, self.network.ranks)
        form.check(report)
        self._form, self.header = form, form.header
        self._advance()
        stored = self.terms.outputs()
        label = "the network's output"
        if runner.last:
            with places.local():
                return *places.mark(batch.outputs(form.header), self.last, label), *stored
        return *foreign_tensors(places, form.header.tensors, self.last, label, runner.transport.device), *stored

    @property
    def has_drawn(self) -> bool:
        """Whether the network has drawn random numbers on a rank."""
        return bool(self._form.drawn)

    def place_stored(self, stored: Sequence[Tensor]) -> None:
        """Store what the stages' forwards have stored in the attributes of this rank's modules.

        Args:
            stored: Results of the autograd function, after those of :attr:`header`.
        """
        self.terms.place(stored)

    def observe_loss(self, outputs: Sequence[Tensor]) -> None:
        """Observe whether the step gives the network's result to the declared loss.

        Args:
            outputs: The result, as the step gets it.
        """
        if self._loss is not None and self.network.declared is not None:
            self.network.declared.observe(self._loss, outputs)
            if self._computes_loss and self.network.runner.last:
                with self.places.local():
                    self._outputs = [output.detach() for output in outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backwards, and return the gradients of the images' tensors and of the parameters."""
        places, runner = self.places, self.network.runner
        count = len(self.header.tensors)
        brought = places.bring_all([g for g in gradients[:count] if g is not None], self.last, "gradients of outputs")
        of_outputs = [g if g is None else brought.get(id(g), g) for g in gradients[:count]]
        of_stored = self.terms.own_gradients(gradients[count:])
        has_stored = any(g is not None for g in gradients[count:])
        sums, of_images, factor = self._run_backward(of_outputs, of_stored, has_stored)
        batch = self._batch
        computed = self._with_keys(batch, sums, of_images)
        outputs = tuple(gradient is not None for gradient in gradients)
        used = self._used(outputs, {key for key, gradient in computed.items() if gradient is not None}, self.terms)
        owner = self.network.division.owner
        targets: list[tuple[int | str, tuple[int, ...], Tensor]]
        targets = [(index, self.first, image) for index, image in enumerate(tensors_in(self.images))]
        targets += [(name, self.network.ranks[owner[name]], parameter) for name, parameter in self.parameters.items()]
        with places.local():
            shared = sorted(key for key in used if isinstance(key, int)) if runner.stage == 0 else []
            computed |= enumerate(multiply_gradients(of_images, factor, keeps_graph()))
            computed |= zip(shared, batch.image_gradients(computed, shared), strict=True)
            parts = {n: computed.pop(n) for n in self.parameters if n in used and owner[n] == runner.stage}
            del sums  # Each gradient is freed when it has been multiplied.
            computed |= self._sums.summed(parts, factor, keeps_graph()).items()
            return [
                self._at(place, computed.get(key), tensor) if key in used else None for key, place, tensor in targets
            ]

    def _with_keys(
        self, batch: WholeBatch, sums: Sequence[Tensor | None], of_images: Sequence[Tensor | None]
    ) -> dict[int | str, Tensor | None]:
        """Return gradients by the index of the image's tensor, or by the name of the parameter.

        Args:
            batch: The batch.
            sums: Gradients of the batch's parameters.
            of_images: Gradients of the images' tensors, in their order. They exist in the first stage only.
        """
        of_parameters = {id(parameter): gradient for parameter, gradient in zip(batch.parameters, sums, strict=True)}
        computed: dict[int | str, Tensor | None] = dict(enumerate(of_images))
        return computed | {name: of_parameters.get(id(parameter)) for name, parameter in self.parameters.items()}

    def _has_changed(self, batch: WholeBatch) -> bool:
        """Whether backwards between this rank's forwards give gradients to other tensors than expected."""
        form = self.network.forms[self._key]
        keys = {key for key, gradient in self._with_keys(batch, *batch.computed).items() if gradient is not None}
        return self._expected is None or keys != self._expected.of_rank or not batch.draws.drawn <= form.drawn

    def _run_backward(
        self, of_outputs: Sequence[Tensor | None], of_stored: Sequence[Tensor | None], has_stored: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None], float | Tensor]:
        """Return the gradients of this rank's parameters and images, and their factor. All ranks must call this.

        Args:
            of_outputs: The gradients of the network's result.
            of_stored: See `WholeBatch.backward`.
            has_stored: Whether a stored value of any stage has a gradient.
        """
        batch, loss, keep = self._batch, self._loss, keeps_graph()
        factor: float | Tensor = 1.0
        uses_loss = False
        if loss is not None and (self._computes_loss or isinstance(batch, InterleavedBatch)):
            will_interleave = self.network.can_interleave(self._key, sum(batch.sizes))
            verdict = judge(self.places, self.last, loss, batch, of_outputs, has_stored, self._outputs)
            if loss.is_open or isinstance(batch, InterleavedBatch):
                loss.settle(verdict)
            self._has_compared = True
            if not loss.is_open:
                self._outputs = []
            if isinstance(batch, InterleavedBatch):
                if verdict.kind in ("factor", "assumed"):
                    return *batch.gradients(keep), verdict.factor
                with self.places.local():
                    batch = self._batch = batch.run_forwards_again(self.network.other_checkpointing)
            elif verdict.kind == "factor" and will_interleave:
                # A run that continues from a checkpoint begins in this order, where the uninterrupted run has 1F1B.
                factor, uses_loss = verdict.factor, True
        self.network.runner.early = self._sums.begin(self._form)
        with self.places.local():
            results = batch.backward(of_outputs, keep, of_stored, self._form.draws_backward, uses_loss)
        return *results, factor

    @property
    def _computes_loss(self) -> bool:
        """Whether a backward that was not run between the forwards computes the gradients of the declared loss.

        It does so in the first step, and if the form of the batch is new, as of a smaller last batch.
        """
        loss = self._loss
        if loss is None or isinstance(self._batch, InterleavedBatch):
            return False
        if loss.is_open or loss.expected is None or self._has_compared:
            return loss.is_open
        return self.network.can_interleave(self._key, sum(self._batch.sizes))

    @property
    def terms(self) -> CallTerms:
        """Values that the call's forwards have stored, after :meth:`run`."""
        return self._batch.terms

    def _advance(self) -> None:
        """Set all ranks' generators to equal states, which are other states than before if a stage has drawn."""
        runner, draws, form = self.network.runner, self._batch.draws, self._form
        runner.drawn |= form.drawn
        self._set_generators(draws, self._first_of_last, form.drawn)
        if not draws.in_order and not draws.drawn <= form.drawn:
            runner.unseen_draws += 1

    def _advance_backward(self, drawn: set[str]) -> None:
        """Set all ranks' generators to equal states after backwards in which a stage may have drawn.

        Args:
            drawn: Names of the generators from which any rank's backwards have drawn.
        """
        draws = self._batch.backward_draws
        if draws is None:
            return
        self._form.draws_backward = bool(drawn) or bool(self._form.draws_backward)
        if drawn:
            self._set_generators(draws, self.network.runner.placement.rank_of(0, 0), drawn)

    def _set_generators(self, draws: PassedStates, last: int, drawn: set[str]) -> None:
        """Continue with the states of the rank that has drawn last, or advance all generators that were drawn from."""
        device = self.network.runner.transport.device
        if draws.in_order:
            self.places.tell((last,), lambda: draws.after, "generators").restore(device)
        else:
            with self.places.local():
                advance(drawn, device)

    def _used(self, outputs: tuple[bool, ...], local_keys: set[int | str], terms: CallTerms) -> set[int | str]:
        """Return the keys of all tensors that have a gradient on any rank. Place what hooks have stored in backwards.

        The ranks exchange the keys in the first backward with a form and a set of outputs, and later when a rank says
        that the rank's keys have changed. If backwards have run between the forwards, the ranks have said so after the
        forwards, see `CallTerms.finish`.

        Args:
            outputs: For each output, whether it has a gradient.
            local_keys: Keys of the tensors that have a gradient on this rank.
            terms: What this rank's microbatches have stored.
        """
        places, form, batch = self.places, self._form, self._batch
        everyone, drawn = range(places.world_size), batch.draws.drawn
        drawn_backward = [] if batch.backward_draws is None else sorted(batch.backward_draws.drawn)
        known = form.newest = form.used.get(outputs)
        if known is not None and known is self._expected and isinstance(batch, InterleavedBatch):
            if not terms.have_changed:
                return known.of_all
        elif known is not None:
            has_changed = local_keys != known.of_rank or not drawn <= form.drawn
            changes = places.exchange((has_changed, terms.stores_in_backward, drawn_backward), everyone, "changes")
            if not any(changed for changed, *_ in changes):
                if any(stores for _, stores, _ in changes):
                    terms.place_of_backward()
                self._advance_backward({name for *_, names in changes for name in names})
                return known.of_all
        report = BackwardReport(
            sorted(local_keys, key=str), sorted(drawn), terms.stores_in_backward, drawn_backward, batch.adds_to_grad
        )
        reports = places.exchange(report, everyone, "used")
        self._advance_backward({name for received in reports for name in received.drawn_backward})
        if any(received.stores for received in reports):
            terms.place_of_backward()
        return form.learn_backward(outputs, reports, places.rank)

    def _at(self, place: tuple[int, ...], gradient: Tensor | None, like: Tensor) -> Tensor:
        """Return a gradient of a place: this rank's gradient, or a foreign tensor."""
        if self.places.rank in place:
            assert gradient is not None
            return self.places.mark(gradient, place)
        return self.places.foreign_like(like, place)


class NetworkFunction(torch.autograd.Function):
    """A network as one function of the images and the parameters."""

    @staticmethod
    def forward(ctx: Any, call: PlacedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the forwards, which have already run."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        results = call.results()
        # What has been stored follows. All of it has a gradient.
        pairs = zip(results, call.header.tensors, strict=False)
        ctx.mark_non_differentiable(*[result for result, spec in pairs if not spec.needs_gradient])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run the backwards of this rank's stage.

        If the gradients need gradients themselves (``create_graph=True``), the network's own code runs again instead.
        """
        call: PlacedCall = ctx.call
        count = len(call.header.tensors)
        if torch.is_grad_enabled():
            if any(gradient is not None for gradient in gradients[count:]):
                raise RefusedError(
                    "a gradient of a value that the network's forward has stored is computed with create_graph=True, "
                    "which a divided network cannot do: return the value from the network's forward"
                )
            return (None, *gradients_with_graph(call, gradients[:count]))
        with torch.no_grad():
            return (None, *call.backward(gradients))
