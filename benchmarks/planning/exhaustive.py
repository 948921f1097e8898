"""The search for stages against brute force on 2,000 random graphs. Target: within 5 % of the best of all layouts.

1,900 chains of 5 to 9 nodes with up to two skips on 2 to 4 devices, with all kinds of requests, and 100 of up to 6
nodes on two machines of four devices, in some of which the first is half as fast. What is compared are simulated times.
"""

import random
import statistics
import sys
import time
from typing import Any

from bench import HERE, ROOT
from pieces import Pieces, parser
from ranks import report

sys.path.append(str(ROOT / "tests" / "planning"))
from random_graphs import excess, random_question, random_question_on_machines

KINDS = {"2 to 4 devices": (random_question, 19), "two machines of 4": (random_question_on_machines, 10)}
GRAPHS = {"2 to 4 devices": 100, "two machines of 4": 10}  # of a piece


def search(name: str) -> dict[str, Any]:
    """How far from the best the search ends, for each graph of a piece."""
    kind, number = name.split("/")
    rng = random.Random(f"{kind} {number}")
    start = time.process_time()
    return {
        "over": [excess(KINDS[kind][0](rng)) for _ in range(GRAPHS[kind])],
        "seconds": time.process_time() - start,
    }


def main() -> None:
    """Search what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    names = [f"{kind}/{number}" for kind, (_, count) in KINDS.items() for number in range(count)]
    if not pieces.measure(names, search):
        return
    rows = [("devices", "graphs", "the best itself", "within 1 %", "within 5 %", "mean", "worst")]
    for kind, (_, count) in KINDS.items():
        over = [one for number in range(count) for one in pieces.known[f"{kind}/{number}"]["over"]]
        shares = [f"{sum(one <= most for one in over) / len(over):.1%}" for most in (1 + 1e-9, 1.01, 1.05)]
        rows.append((kind, str(len(over)), *shares, f"{statistics.fmean(over) - 1:.2%}", f"{max(over) - 1:.2%}"))
    report(
        HERE / "exhaustive.md",
        "The search against brute force",
        f"{__doc__}\nA part of it is [a test](../../tests/planning/test_partition.py).",
        rows,
        "no training",
    )


if __name__ == "__main__":
    main()
