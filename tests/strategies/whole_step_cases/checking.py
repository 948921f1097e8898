"""Check that cases train under the whole step as on one device."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.strategies.whole_step_cases import Case
from tests.strategies.whole_step_cases.running import on_one_device, on_ranks, verdict

# Ranks that have diverged end after the time-out. Here this would be a fault.
TIMEOUT = 30.0


def whole_step(case: Case, replicas: Sequence[int], **options: Any) -> Any:
    cuts = list(case.cuts[: len(replicas) - 1])
    fixed = {"cuts": cuts, "microbatches": case.microbatches, "submodule": case.submodule}
    return HybridPipelineStrategy(replicas=list(replicas), **{"timeout": TIMEOUT, **options, **fixed})


def check_error(case: Case, replicas: Sequence[int]) -> None:
    """Check that a case ends with the error message that the case names."""
    text = "trained"
    try:
        on_ranks([case], whole_step, replicas, raises=True)
    except AssertionError as error:  # It has the tracebacks of all ranks.
        text = str(error)
    assert re.search(case.error, text), text


def check(cases: Sequence[Case], replicas: Sequence[int], **options: Any) -> None:
    """Check that cases train with some options of the strategy as on one device."""
    verdicts = map(verdict, on_one_device(cases), on_ranks(cases, partial(whole_step, **options), replicas))
    names = [case.name for case in cases]
    assert dict(zip(names, verdicts, strict=True)) == dict.fromkeys(names, "equal")
