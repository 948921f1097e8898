"""The simulator's long run: 200,000 seeds on one code, in as many sittings as it takes.

    python benchmarks/parameter_server/long_run.py [--seeds 200000] [--minutes 60] [--weaker]

A seed is two runs in virtual time: of the coordinator and its members, and of workers and servers. What was run is
kept in `long_run.json` with a digest of the code of all that is simulated, the simulator included: the same command
goes on from there, and begins anew when that code has changed. Other work beside it costs time alone: nothing else
decides what happens.

A check that raises a false alarm is corrected to allow it. It looks on and changes nothing, and what held before
holds then, too: so `--weaker` goes on after such a change, and tries the seeds again in which something was found.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIMULATOR = "tests.paramserver.simulation"
SIMULATED = ("cnnstrategies.paramserver", SIMULATOR)
FIRST = 600_000  # Its seeds are none that the code was developed with.
KEPT = HERE / "long_run.json"
# What looks at the runs, and has no part in them but that `data.watch` says whether a step was begun.
CHECKS = [f"{SIMULATOR}.{name}" for name in ("invariants", "data.checks", "data.watch")]


def sources(names: list[str]) -> str:
    """The digest of modules' source files."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        digest.update(name.encode() + (file.read_bytes() if file.exists() else b"no file"))
    return digest.hexdigest()[:16]


def run(seeds: int, minutes: float, kept: dict[str, Any]) -> None:
    """Run seeds until there are enough or the time is over, and note what came of them."""
    from tests.paramserver.simulation.run import PLANES, results

    begun, noted, done, worked = time.monotonic(), 0.0, 0, 0.0
    counts = {plane: Counter(kept["counts"].get(plane, {})) for plane in PLANES}
    before = sum(earlier["seeds"] for earlier in kept["sittings"])
    sitting = {"date": f"{datetime.date.today():%d %B %Y}", "processor": processor(), "seeds": 0, "hours": 0.0}
    kept["sittings"].append(sitting)
    cores = os.cpu_count() or 1
    with results(range(FIRST + before, FIRST + seeds), list(PLANES), cores) as parts:
        for part in parts:
            done, worked = done + part.seeds, worked + part.worked
            for plane, injected in part.counts.items():
                counts[plane] += injected
            for failure in part.failures:
                print(failure.brief, flush=True)
                kept["failed"].append(failure.seed)
            passed = time.monotonic() - begun
            sitting |= {"seeds": done, "hours": round(worked / 3600, 3)}
            kept["counts"] = {plane: dict(sorted(count.items())) for plane, count in counts.items()}
            over = passed > 60 * minutes
            if over or passed - noted > 60 or before + done >= seeds:
                noted = passed
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                print(f"{before + done:,} of {seeds:,} seeds, {len(kept['failed'])} violations", flush=True)
            if over:
                return


def again(kept: dict[str, Any]) -> None:
    """Try the seeds again in which something was found."""
    from tests.paramserver.simulation.run import PLANES, simulate_all

    for seed in list(kept["failed"]):
        failures = simulate_all(list(PLANES), range(seed, seed + 1)).failures
        print(f"seed {seed}: {failures[0].brief if failures else 'nothing is found any more'}", flush=True)
        if not failures:
            kept["failed"].remove(seed)
            kept["alarms"].append(seed)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def processor() -> str:
    """This machine's, and its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor())}, {os.cpu_count()} cores"


def page(kept: dict[str, Any], wanted: int) -> None:
    """Write the page."""
    sys.path.append(str(HERE.parent / "pipeline"))
    from ranks import report

    total, hours = (sum(sitting[field] for sitting in kept["sittings"]) for field in ("seeds", "hours"))
    injected: Counter[str] = Counter()
    for counts_of_plane in kept["counts"].values():
        injected.update(counts_of_plane)
    faults = ", ".join(f"{kind} {count:,}" for kind, count in sorted(injected.items()))
    failed = ", ".join(map(str, kept["failed"])) or "none"
    alarms = ""
    if kept["alarms"]:
        alarms = (
            f" In {', '.join(map(str, kept['alarms']))} a check had found what is no fault; nothing is found there "
            "with the checks as they are now."
        )
    text = (
        f"{__doc__}\n**{total:,} of {wanted:,} seeds** from {FIRST:,} on, in {hours:.1f} hours of processor time; "
        f"violations in: {failed}.{alarms} "
        f"Digest of the code: `{kept['code']}`, of the checks: `{kept['checks']}`.\n\nInjected: {faults}."
    )
    rows = [("date", "processor", "seeds", "hours of one core", "seeds per second of it")]
    rows += [
        (sitting["date"], sitting["processor"], f"{sitting['seeds']:,}", f"{sitting['hours']:.2f}", _rate(sitting))
        for sitting in kept["sittings"]
    ]
    report(HERE / "long_run.md", "The simulator's long run", text, rows)


def _rate(sitting: dict[str, Any]) -> str:
    return f"{sitting['seeds'] / max(3600 * sitting['hours'], 1):.1f}"


def main() -> None:
    """Go on, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200_000, help="how many in all")
    parser.add_argument("--minutes", type=float, default=60, help="of this sitting")
    parser.add_argument("--weaker", action="store_true", help="the checks alone have changed, and allow more")
    arguments = parser.parse_args()
    names = json.loads(subprocess.check_output([sys.executable, "-c", NAMES], cwd=ROOT))
    code, checks = (sources([module for module in names if (module in CHECKS) == looks]) for looks in (False, True))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if kept.get("code") != code or (kept["checks"] != checks and not arguments.weaker):
        kept = {"code": code, "sittings": [], "failed": [], "alarms": [], "counts": {}}
    kept["checks"] = checks
    left = arguments.seeds - sum(sitting["seeds"] for sitting in kept["sittings"])
    sys.path.append(str(ROOT))
    again(kept)
    if left > 0:
        run(arguments.seeds, arguments.minutes, kept)
    page(kept, arguments.seeds)


NAMES = f"""
import json, sys
sys.path.append({str(ROOT)!r})
from tests.paramserver.simulation.run import PLANES
for simulate in PLANES.values():
    simulate(0)
print(json.dumps(sorted(name for name in sys.modules if name.startswith({SIMULATED!r}))))
"""


if __name__ == "__main__":
    main()
