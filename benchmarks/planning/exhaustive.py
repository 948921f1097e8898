"""The search for stages against brute force on 2,000 random graphs. Target: within 5 % of the best of all layouts.

Of up to 800 layouts on up to 8 devices the search looks at all; "by local search" is what it finds if it may not, as
with larger networks.

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

sys.path.append(str(ROOT))
from cnnstrategies.planning import partition
from tests.planning.random_graphs import excess, random_question, random_question_on_machines

LOCAL = ", by local search"
GRAPHS = {"2 to 4 devices": (random_question, 19, 100), "two machines of 4": (random_question_on_machines, 10, 10)}
KINDS = [kind + way for kind in GRAPHS for way in ("", LOCAL)]


def search(name: str) -> dict[str, Any]:
    """How far from the best the search ends, for each graph of a piece."""
    kind, number = name.split("/")
    draw, _, count = GRAPHS[kind.removesuffix(LOCAL)]
    partition.ALL_LAYOUTS = 0 if kind.endswith(LOCAL) else 800
    rng = random.Random(f"{kind.removesuffix(LOCAL)} {number}")
    start = time.process_time()
    return {"over": [excess(draw(rng)) for _ in range(count)], "seconds": time.process_time() - start}


def main() -> None:
    """Search what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    counts = {kind: GRAPHS[kind.removesuffix(LOCAL)][1] for kind in KINDS}
    names = [f"{kind}/{number}" for kind, count in counts.items() for number in range(count)]
    if not pieces.measure(names, search):
        return
    rows = [("devices", "graphs", "the best itself", "within 1 %", "within 5 %", "mean", "worst")]
    for kind, count in counts.items():
        over = [ratio for number in range(count) for ratio in pieces.known[f"{kind}/{number}"]["over"]]
        shares = [f"{sum(ratio <= most for ratio in over) / len(over):.1%}" for most in (1 + 1e-9, 1.01, 1.05)]
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
