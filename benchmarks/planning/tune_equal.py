"""Ten runs of `tune`'s contest between settings that change nothing: no winner may be named.

The load average says how busy the machine was; 2 are the run's own. A side that is behind has left early, because it
could not win any more; nothing is claimed of it.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from bench import HERE, environment, threads
from pieces import Pieces, parser
from ranks import report
from tune_networks import configuration

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.contest import Contest
from cnnstrategies.planning.tune.settings import Setting

RUNS = 10
LIMITS = """\
What was seen before: one of two equal processes can be a tenth quicker in all of its rounds, as fresh rounds of the
same processes confirm (Mytkowicz et al., ASPLOS 2009, have causes), and two of ten runs named a winner. Tried then:
other processes for the fresh rounds, and these started in the other order. Since then a gain below a quarter must show
in each of three new pairs of processes, started in alternating order, and in ten runs beside other work no winner was
named, though one side was 1.059 [1.021, 1.095] times as fast in its race. Now all runs are forked from one process, and
those that stay to the end differ from the default by 2 % at most."""
SIDES = ("first", "second")


def equal(name: str) -> dict[str, Any]:
    """One contest: what was said of each side."""
    os.environ.update(environment())
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.yaml"
        base.write_text(yaml.safe_dump(configuration("ResNet-20")))
        contest = Contest(["fit", "--config", str(base)], Path(folder), time.monotonic() + 180, together=len(SIDES))
        winner = contest.run([Setting(side, {"seed_everything": 1}, Effect.NONE) for side in SIDES])
        verdicts = [row.verdict for row in contest.rows.values() if row.verdict is not None]
    return {
        "winner": winner.name if winner else "",
        "said": [[verdict.outcome, verdict.speed, verdict.low, verdict.high, verdict.rounds] for verdict in verdicts],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    names = [f"run {number}" for number in range(1, RUNS + 1)]
    if not pieces.measure(names, equal):
        return
    rows = [("run", "winner", *(f"{side} side" for side in SIDES), "rounds", "load average")]
    for name in names:
        result = pieces.known[name]
        verdicts = [
            f"{outcome}: {speed:.3f} [{low:.3f}, {high:.3f}]" for outcome, speed, low, high, _ in result["said"]
        ]
        rounds = max(each[4] for each in result["said"])
        rows.append((name.split()[1], result["winner"] or "none", *verdicts, str(rounds), f"{result['load']:.1f}"))
    text = (
        f"{__doc__}\nResNet-20, the configuration of [the grid](tune_grid.md); two equal candidates beside the default."
        f"\n\n{LIMITS}"
    )
    report(HERE / "tune_equal.md", "Tune between equals", text, rows, threads())


if __name__ == "__main__":
    main()
