"""Plans for devices with unequal memories against brute force, on 1,500 random graphs. Target: 95 % within 5 %.

The graphs are those of [the search against brute force](exhaustive.md), on 2 to 4 devices. Each device has a random
speed and a random memory, drawn from the memory that some layouts need, so that some layouts fit and others do not.
Brute force tries all layouts with all numbers of microbatches of each device. The search tries all layouts with the
numbers of microbatches that it computes; "by local search" it may not try all layouts. What is compared are simulated
times. Where brute force finds no layout that fits, the search must not find one either, and the reverse.
"""

import math
import random
import statistics
import sys
import time
from typing import Any

from bench import HERE, ROOT
from pieces import Pieces, parser
from ranks import report

sys.path.append(str(ROOT))
from cnnstrategies.planning import partition
from tests.planning.random_graphs import best_of_all, random_question, with_unequal_memories

PIECES, GRAPHS = 15, 100
LAYOUTS = {"all layouts": 800, "by local search": 0}
MOST = 24  # Largest number of devices times microbatches, so that brute force takes less than a second.


def search(name: str) -> dict[str, Any]:
    """Search for the layouts of the graphs of a piece, and return their times divided by the best times.

    Without a layout that fits, the ratio is 0. If only one of the two finds a layout that fits, it is -1.
    """
    rng = random.Random(f"unequal {name}")
    start = time.process_time()
    over: dict[str, list[float]] = {way: [] for way in LAYOUTS}
    for _ in range(GRAPHS):
        question = random_question(rng)
        while question.job.cluster.devices * question.problem.microbatches > MOST or question.job.replicas is not None:
            question = random_question(rng)
        planner = with_unequal_memories(question, rng)
        best = best_of_all(planner)
        for way, most in LAYOUTS.items():
            partition.ALL_LAYOUTS = most
            layout = planner.search()
            assert layout is not None
            step = planner.time(layout)
            if math.isfinite(step) and math.isfinite(best):
                over[way].append(step / best)
            else:
                over[way].append(0.0 if step == best else -1.0)
    return {"over": over, "seconds": time.process_time() - start}


def main() -> None:
    """Search what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    names = [str(number) for number in range(PIECES)]
    if not pieces.measure(names, search):
        return
    rows = [("search", "graphs", "fitting", "wrong about fitting", "the best itself", "within 5 %", "mean", "worst")]
    for way in LAYOUTS:
        ratios = [ratio for name in names for ratio in pieces.known[name]["over"][way]]
        fitting = [ratio for ratio in ratios if ratio > 0]
        best, near = (sum(ratio <= most for ratio in fitting) / len(fitting) for most in (1 + 1e-9, 1.05))
        rows.append(
            (
                way,
                str(len(ratios)),
                str(len(fitting)),
                str(sum(ratio < 0 for ratio in ratios)),
                f"{best:.1%}",
                f"{near:.1%}",
                f"{statistics.fmean(fitting) - 1:.2%}",
                f"{max(fitting) - 1:.2%}",
            )
        )
    report(
        HERE / "unequal.md",
        "Plans for unequal memories against brute force",
        f"{__doc__}\nA part of it is [a test](../../tests/planning/test_unequal.py).",
        rows,
        "no training",
    )


if __name__ == "__main__":
    main()
