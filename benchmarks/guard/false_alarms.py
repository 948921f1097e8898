"""Trainings without faults, in which the callback `Guard` should find nothing.

The first part are trainings that look unusual by design. The second part are published networks of torchvision on two
ranks. The guard checks after the first step and after each 20 steps. The programs of the page of planted faults, run
without their faults, are counted on that page. The last part are entries of the zoo.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "pipeline"), str(Path(__file__).parent)]

import torch
from by_design import STEPS, cases
from guarded import findings_of
from ranks import report

HERE = Path(__file__).parent
ZOO_RESULTS = HERE / "zoo_alarms.json"  # Results of all runs over the zoo.
ZOO = """
## The zoo

Pairs of an entry of the zoo (see the page of tested networks and modules) and a strategy, as `make test-zoo-guard`
trains them: six steps, with checks after the first, the fifth and the last one. The pairs of November 2026 had twelve
steps. A dash stands for a pair that was not tried. `zoo_alarms.json` keeps the results, and
`make test-zoo-guard CONTINUE=1` tries the other pairs. Commits are those of the guard that was tried, with the number
of entries.

These runs have found three faults of the guard, which are repaired: an alarm about a memory of labels
(`CrossBatchMemory`, `ddp_balanced`), a layer that was computed twice on a rank that did not have all its values, so
that it waited without end (`MoCoTask`, version 2, `hybrid_pipeline [2, 1]`), and an alarm about a bias that does not
change because its gradients cancel between the workers (`VICReg, gather_distributed`, `parameter_server`). They have
also found a fault of `hybrid_pipeline`, which is repaired: two modules of torch-uncertainty that ask `self.training`
(batch ensemble, MC dropout) failed in a validation, for a cause outside of the guard. PSPNet's encoder has layers that
it does not use.
"""


Entries = Mapping[str, Mapping[str, Mapping[str, Any]]]  # Results by the names of entries and of strategies.


def zoo_entries(kept: Path, folder: Path) -> Entries:
    """Return the results of all runs of `make test-zoo-guard`, and keep them.

    Args:
        kept: File that keeps results. For a pair without a finding and a note it has only when the pair was tried.
        folder: Folder with the files of the last run, one for each entry.
    """
    entries: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for file in folder.glob("*.json"):
        for strategy, result in json.loads(file.read_text()).items():
            is_silent = result.get("findings") == result.get("notes") == []
            entries.setdefault(file.stem, {})[strategy] = result["measured"] if is_silent else result
    kept.write_text(json.dumps(entries, indent=0, sort_keys=True) + "\n")
    silent = {"findings": [], "notes": []}
    return {
        name: {
            strategy: {**silent, "measured": result} if isinstance(result, str) else result
            for strategy, result in results.items()
        }
        for name, results in sorted(entries.items())
    }


def is_refused(result: Mapping[str, Any]) -> bool:
    """Return whether the strategy refuses the entry."""
    return "refused" in result


def zoo_text(entries: Entries) -> str:
    """Return a table with a row for each strategy, and the entries that strategies refuse."""
    lines = ["| strategy | trained | refused | findings | notes | commits |", "|---|---|---|---|---|---|"]
    strategies = sorted({strategy for results in entries.values() for strategy in results})
    for strategy in strategies:
        results = [entry[strategy] for entry in entries.values() if strategy in entry]
        trained = [result for result in results if not is_refused(result)]
        commits = Counter(result["measured"].partition(", ")[2] for result in results)
        cells = [strategy, len(trained), len(results) - len(trained)]
        cells += [sum(len(result[key]) for result in trained) for key in ("findings", "notes")]
        lines.append(
            "| " + " | ".join(map(str, cells)) + f" | {', '.join(f'{key} ({n})' for key, n in commits.items())} |"
        )
    refusals = [
        f"- {strategy}, {name}: {results[strategy]['refused']}"
        for name, results in entries.items()
        for strategy in strategies
        if is_refused(results.get(strategy, {}))
    ]
    notes = [
        f"- {name}, {strategy}: {result['notes'][0]}"
        for name, results in entries.items()
        for strategy, result in results.items()
        if result.get("notes")
    ]
    lines += ["", "Notes, which do not stop a run (of the lowest rank):", "", *notes] if notes else []
    return "\n".join([*lines, "", *(["Refused, as without the guard:", "", *refusals] if refusals else [])]).rstrip()


def zoo_rows(entries: Entries) -> list[list[str]]:
    """Return a table with a row for each entry and a column for each strategy, with its heading."""
    strategies = sorted({strategy for results in entries.values() for strategy in results})

    def cell(result: Mapping[str, Any] | None) -> str:
        if result is None or is_refused(result):
            return "-" if result is None else "refused"
        return "; ".join([*result["findings"], *["note"] * bool(result["notes"])]) or "none"

    rows = [[name, *(cell(results.get(strategy)) for strategy in strategies)] for name, results in entries.items()]
    return [["network or module", *strategies], *rows]


def main() -> None:
    """Run all trainings, or some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="trainings whose names contain these words")
    parser.add_argument("--results", type=Path, help="file that keeps results; known results are not computed again")
    parser.add_argument("--zoo", type=Path, help="folder of the zoo's results, by default build/zoo/alarms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, list[str]] = {}
    if options.results is not None and options.results.exists():
        known = json.loads(options.results.read_text())
    rows = [["training", "strategy", "steps", "findings"]]
    for name, strategy, make in cases():
        key = f"{name}, {strategy}"
        if options.only and not any(word in key for word in options.only):
            continue
        steps = STEPS.get(name, 60)
        if key not in known:
            began = time.monotonic()
            known[key] = [str(finding) for finding in findings_of(make(), steps)]
            print(f"{time.monotonic() - began:.1f} s, {key}: {'; '.join(known[key]) or 'none'}", flush=True)
            if options.results is not None:
                options.results.write_text(json.dumps(known, indent=1))
        rows.append([name, strategy, str(steps), "; ".join(known[key]) or "none"])
    if not options.only:
        entries = zoo_entries(ZOO_RESULTS, options.zoo or HERE.parents[1] / "build" / "zoo" / "alarms")
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        table = "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
        text = "\n\n".join([(__doc__ or "").strip(), table, ZOO.strip(), zoo_text(entries)])
        report(HERE / "false_alarms.md", "Trainings in which the guard finds nothing", text, zoo_rows(entries))


if __name__ == "__main__":
    main()
