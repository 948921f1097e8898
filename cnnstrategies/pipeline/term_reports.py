"""Reports of the ranks to each other, after the forwards of a call, about what the forwards have stored."""

from collections.abc import Sequence
from typing import NamedTuple

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_terms import NOTHING
from cnnstrategies.pipeline.tensor_headers import TensorHeader
from cnnstrategies.placed import Places


class NeedsOneMicrobatchError(Exception):
    """A stage needs the whole batch as one microbatch. All ranks raise this error in the same call.

    Attributes:
        reason: A clause that names the module.
        is_once: Whether the reason holds for this call only.
    """

    def __init__(self, reason: str, is_once: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_once = reason, is_once


class TermReport(NamedTuple):
    """Report of a rank about a call.

    Attributes:
        reason: Why the rank's stage needs the whole batch as one microbatch; None if it does not.
        header: What the stage has stored; see `CombinedTerms`.
        is_once: Whether the reason holds for this call only.
        refusal: Error message for all ranks, if the rank's forwards have done what a pipeline cannot do.
    """

    reason: str | None
    header: TensorHeader = NOTHING
    is_once: bool = False
    refusal: str | None = None


class TermReports:
    """The last reports of all ranks. A rank sends its report only if it differs from the rank's last report.

    Args:
        places: The rules of this rank.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._last: dict[int, TermReport] = {}

    def exchange(self, report: TermReport, first_ranks: Sequence[int], subject: str) -> list[TensorHeader]:
        """Exchange the reports about a call. All ranks must call this.

        Args:
            report: The report of this rank.
            first_ranks: For each stage, the rank that runs the first microbatch.
            subject: Subject of the messages.

        Returns:
            What each stage has stored.

        Raises:
            ConfigurationError: The forwards of a rank have done what a pipeline cannot do.
            NeedsOneMicrobatchError: A stage needs the whole batch as one microbatch.
        """
        places, last = self._places, self._last
        news = None if report == last.get(places.rank) else report
        for rank, received in enumerate(places.exchange(news, range(places.world_size), subject)):
            if received is not None:
                last[rank] = TermReport(*received)
        refusals = [other.refusal for _, other in sorted(last.items()) if other.refusal is not None]
        if refusals:
            raise ConfigurationError(refusals[0])
        of_stages = [last[rank] for rank in first_ranks]
        for of_stage in of_stages:
            if of_stage.reason is not None:
                last.clear()
                raise NeedsOneMicrobatchError(of_stage.reason, of_stage.is_once)
        return [of_stage.header for of_stage in of_stages]

    @property
    def are_empty(self) -> bool:
        """Whether no rank has stored anything in the last call."""
        return all(report == TermReport(None) for report in self._last.values())
