"""Print how each case ends under `hybrid_pipeline`. The arguments are REPLICAS [CASE ...].

Each case runs in processes of its own, so that a case that ends badly does not concern the other cases.
"""

import logging
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.strategies.whole_step_cases import CASES, Case
from tests.strategies.whole_step_cases.running import on_one_device, on_ranks, verdict


def pipeline(case: Case, replicas: Sequence[int]) -> Any:
    from cnnstrategies.strategies import HybridPipelineStrategy

    return HybridPipelineStrategy(**options(case, replicas))


def options(case: Case, replicas: Sequence[int]) -> dict[str, Any]:
    return {
        "replicas": list(replicas),
        "cuts": list(case.cuts[: len(replicas) - 1]),
        "microbatches": case.microbatches,
        "submodule": case.submodule,
        "timeout": 20.0,
    }


def main() -> None:
    layout, *names = sys.argv[1:]
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    replicas = [int(number) for number in layout.split(",")]
    counts: dict[str, int] = {}
    for name in names or CASES:
        start = time.monotonic()
        try:
            (expected,) = on_one_device([CASES[name]])
        except AssertionError as error:
            text = f"fails on one device: {str(error)[-1500:]}"
        else:
            try:
                (results,) = on_ranks([CASES[name]], pipeline, replicas)
                text = verdict(expected, results)
            except AssertionError as error:
                ranks = re.split(r"^(?=rank \d+: )", str(error), flags=re.MULTILINE)
                parts = ["\n".join(part.splitlines()[-15:]) for part in ranks if part]
                text = "FAILS:\n" + "\n---\n".join(parts)
        kind = text.split()[0]
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{name:28} {time.monotonic() - start:5.1f} s  {text}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
