"""Trainings without faults, in which the callback `Guard` should find nothing.

The first part are trainings that look unusual by design. The second part are published networks of torchvision on two
ranks. The guard checks after the first step and after each 20 steps. The programs of the page of planted faults, run
without their faults, are counted on that page. The last part are entries of the zoo (see the page of tested networks
and modules), each with twelve steps under the strategy, as `make test-zoo-guard` trains them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "pipeline"), str(Path(__file__).parent)]

import torch
from by_design import STEPS, cases
from guarded import findings_of
from ranks import report

HERE = Path(__file__).parent
ZOO_STEPS = 12


def zoo_rows(folder: Path) -> list[list[str]]:
    """Return a row for each strategy under which `make test-zoo-guard` has trained entries of the zoo.

    Args:
        folder: Folder of the results, with a file for each entry.
    """
    entries = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    rows = []
    for strategy in sorted({strategy for entry in entries for strategy in entry}):
        results = [entry[strategy] for entry in entries if strategy in entry]
        trained = [result for result in results if "refused" not in result]
        findings = [finding for result in trained for finding in result["findings"]]
        name = f"{len(trained)} networks and modules of the zoo"
        rows.append([name, strategy, str(ZOO_STEPS), "; ".join(findings) or "none"])
    return rows


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
    rows += zoo_rows(options.zoo or HERE.parents[1] / "build" / "zoo" / "alarms")
    if not options.only:
        report(HERE / "false_alarms.md", "Trainings in which the guard finds nothing", __doc__ or "", rows)


if __name__ == "__main__":
    main()
