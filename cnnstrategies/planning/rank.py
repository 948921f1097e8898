"""Price all strategies with one model and put them in order."""

from collections.abc import Sequence
from dataclasses import dataclass

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Candidate, Effect, Job, Prediction, price_per_hour
from cnnstrategies.planning.costs import format_bytes
from cnnstrategies.planning.data_parallel import DataParallel
from cnnstrategies.planning.hybrid import Chosen, Hybrid
from cnnstrategies.planning.parameter_server import ParameterServer

TIE = 0.03  # below which the simpler strategy is the better one


@dataclass(frozen=True)
class Row:
    """A candidate with what is predicted of it.

    Attributes:
        candidate: The strategy.
        prediction: Its costs.
        price: Of a million samples, in the unit of the machines' prices.
    """

    candidate: Candidate
    prediction: Prediction
    price: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.prediction.rate


@dataclass(frozen=True)
class Ranking:
    """The strategies, best first.

    Attributes:
        job: What they are for.
        same: Those that learn what DDP learns with the same global batch.
        changing: Those that learn differently, which no time can be compared with.
        notes: What was left out or changed, and why.
        hybrid: The layout of the best hybrid pipeline.
    """

    job: Job
    same: tuple[Row, ...]
    changing: tuple[Row, ...]
    notes: tuple[str, ...]
    hybrid: Chosen | None = None

    @property
    def best(self) -> Row:
        """The first of those that change nothing, if any fits."""
        return (self.same or self.changing)[0]


def rank(job: Job) -> Ranking:
    """Price the candidates of all families.

    Raises:
        ConfigurationError: None fits into memory.
    """
    hybrid = Hybrid(job)
    models: tuple[DataParallel | Hybrid | ParameterServer, ...] = (DataParallel(job), hybrid, ParameterServer(job))
    rows, notes = [], []
    for model in models:
        for candidate in model.candidates():
            if job.families and candidate.family not in job.families:
                continue
            made = model.predict(candidate)
            if job.memory is not None and made.memory > job.memory:
                needed, limit = format_bytes(made.memory), format_bytes(job.memory)
                notes.append(f"{candidate}: needs {needed} a device, there are {limit}")
                continue
            price = price_per_hour(job.cluster, candidate.devices) / 3600 * 1e6 / made.rate
            rows.append(Row(candidate, made, price))
    if not rows:
        raise ConfigurationError(
            f"no strategy fits into the devices ({'; '.join(notes) or 'and no layout of a pipeline does'}): use a "
            "smaller batch, more devices or activation_checkpointing"
        )
    best = _one_of_each_family(rows)
    same = _in_order([row for row in best if row.candidate.effect < Effect.LEARNING])
    changing = _in_order([row for row in best if row.candidate.effect == Effect.LEARNING])
    chosen = next((hybrid.of(row.candidate) for row in best if row.candidate.family == "hybrid"), None)
    notes += _changes(job, [*same, *changing]) + _reasons(same)
    if not job.profile.fixed:
        notes.append("the profile has one batch size, so times are taken to be proportional to the samples")
    return Ranking(job, tuple(same), tuple(changing), tuple(notes), chosen)


def _one_of_each_family(rows: Sequence[Row]) -> list[Row]:
    best: dict[str, Row] = {}
    for row in rows:
        family = row.candidate.family
        if family not in best or row.rate > best[family].rate:
            best[family] = row
    return list(best.values())


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """By samples per second; of those that tie with the best, the simplest first."""
    ordered = sorted(rows, key=lambda row: -row.rate)
    ties = [row for row in ordered if row.rate >= (1 - TIE) * ordered[0].rate]
    ties.sort(key=lambda row: (row.candidate.family != "ddp", row.candidate.devices, -row.rate))
    return ties + ordered[len(ties) :]


def _changes(job: Job, rows: Sequence[Row]) -> list[str]:
    """Where something else than what was asked is answered."""
    notes = []
    for row in rows:
        candidate = row.candidate
        if candidate.samples != job.samples:
            parts = candidate.options["replicas"][0] if "replicas" in candidate.options else candidate.devices
            notes.append(
                f"{candidate}: {candidate.samples} of {job.samples} samples, since {parts} replicas load equal shares"
            )
    return notes


def _reasons(same: Sequence[Row]) -> list[str]:
    quickest = max(same, key=lambda row: row.rate, default=None)
    if quickest is None or quickest is same[0]:
        return []
    gain = quickest.rate / same[0].rate - 1
    return [f"{same[0].candidate} is first although {quickest.candidate} gains {gain:.1%}: below {TIE:.0%} the simpler"]
