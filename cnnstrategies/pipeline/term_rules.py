"""Find the rules by which a stage combines what its microbatches store, and remember them for later batches."""

from collections.abc import Hashable, Sequence

from cnnstrategies.pipeline.combining import CombiningRule, StoredValues, is_same
from cnnstrategies.pipeline.microbatch_terms import MicrobatchTerms
from cnnstrategies.pipeline.mixing import Arguments, MixingProbe, ProbeResult
from cnnstrategies.pipeline.mixing_backward import reason_of_backward
from cnnstrategies.placed import Places


class TermRules:
    """The rules by which a stage combines stored values, for each form of a batch.

    Args:
        probe: Compares a batch with its parts.
        places: The rules of this rank for placed tensors.
        group: Ranks of the stage's replicas.
    """

    def __init__(self, probe: MixingProbe, places: Places, group: Sequence[int]) -> None:
        self._probe, self._places, self._group = probe, places, group
        # Stored values without which the rules cannot be used, and the rules.
        self._known: dict[Hashable, tuple[StoredValues, list[CombiningRule]]] = {}

    def are_known(self, form: Hashable) -> bool:
        """Whether the rules for batches of a form are known."""
        return form in self._known

    def begin(self, terms: MicrobatchTerms, form: Hashable, needs_gradient: bool) -> bool:
        """Probe this rank's first microbatch before the second one runs, if the rules for the batch are not known.

        Return whether there was a probe.

        After the last microbatch all activations exist, and with the probe's the first step would need more memory than
        later steps.

        Args:
            terms: What the first microbatch has stored.
            form: See :meth:`find`.
            needs_gradient: See :meth:`find`.
        """
        if not terms.keeps_arguments or terms.is_one_part or form in self._known or terms.first_key is not None:
            return False
        self.own_verdict(terms, needs_gradient)
        return True

    def find(
        self, terms: MicrobatchTerms, form: Hashable, needs_gradient: bool, sets_parameters: bool
    ) -> tuple[list[CombiningRule], str | None]:
        """Find the rules for a batch, together with the stage's other replicas, which must all call this.

        Args:
            terms: What all microbatches of the batch have stored.
            form: Key that is equal for batches of the same form.
            needs_gradient: Whether the forwards run with autograd.
            sets_parameters: Whether a forward has set parameters, so that it must not run again.

        Returns:
            The rules, and why the stage needs the whole batch as one microbatch; None if it does not.
        """
        if terms.is_one_part:
            return self._additions(terms, form, sets_parameters), None
        known = self._known.get(form)
        if known is not None and _fits(terms, *known):
            return known[1], None
        if not terms.keeps_arguments:
            return [], "it stores other things than in an earlier batch of the same shapes"
        verdict = self._verdict(terms, needs_gradient)
        if verdict is None:
            key = terms.first_key
            return [], None if key is None else f"it stores {key}, and there are too few samples to find out how"
        if verdict.stored is None:
            return [], verdict.reason
        self._known[form] = verdict.stored, verdict.rules
        fits = _fits(terms, verdict.stored, verdict.rules)
        return verdict.rules, None if fits else "it stores different things in different microbatches"

    def _verdict(self, terms: MicrobatchTerms, needs_gradient: bool) -> ProbeResult | None:
        """Return the result of a probe on all replicas; None if there are too few samples."""
        verdict = self.own_verdict(terms, needs_gradient)
        if len(self._group) > 1:
            verdicts = [v for v in self._places.exchange(verdict, self._group, "probe") if v is not None]
            verdict = next((v for v in verdicts if v.reason is not None), verdicts[0] if verdicts else None)
        return verdict

    def own_verdict(self, terms: MicrobatchTerms, needs_gradient: bool) -> ProbeResult | None:
        """Return the result of a probe on this rank; None if there are too few samples.

        Args:
            terms: What this rank's microbatches have stored.
            needs_gradient: Whether the forwards run with autograd.
        """
        arguments = list(terms.arguments.values())
        samples = [terms.rows.sizes[microbatch] for microbatch in terms.arguments]
        if terms.first_key is None and samples and samples[0] > 2:
            # Only results are compared, and parts of a microbatch show whether samples mix. The whole batch at once
            # would need more memory than any step.
            if terms.first_verdict is None:
                terms.first_verdict = self._probed(arguments[:1], samples[:1], needs_gradient)
            return terms.first_verdict
        return self._probed(arguments, samples, needs_gradient)

    def _probed(
        self, arguments: Sequence[Arguments], samples: Sequence[int], needs_gradient: bool
    ) -> ProbeResult | None:
        verdict = self._probe.verdict(arguments, samples)
        if verdict is not None and verdict.reason is None and needs_gradient:
            reason = reason_of_backward(self._probe, arguments, samples, verdict.has_rows)
            verdict = verdict if reason is None else ProbeResult(reason, None, [])
        return verdict

    def _additions(self, terms: MicrobatchTerms, form: Hashable, sets_parameters: bool) -> list[CombiningRule]:
        """Return the rules of a batch that is one microbatch."""
        (values,) = terms.stored.values()
        if not terms.arguments or not values.keys or sets_parameters:
            return [CombiningRule("same")] * len(values.leaves)
        known = self._known.get(form)
        if known is None or not values.has_form_of(known[0]):
            (arguments,) = terms.arguments.values()
            known = self._known[form] = values._replace(leaves=[]), self._probe.additions(arguments)
        return known[1]


def _fits(terms: MicrobatchTerms, known: StoredValues, rules: Sequence[CombiningRule]) -> bool:
    """Whether the microbatches have stored values that the rules can combine."""
    if not all(values.has_form_of(known) for values in terms.stored.values()):
        return False
    columns = zip(*(values.leaves for values in terms.stored.values()), strict=True)
    return all(
        rule.kind != "same" or rule.is_certain or all(is_same(leaf, other) for other in others)
        for rule, (leaf, *others) in zip(rules, columns, strict=True)
    )
