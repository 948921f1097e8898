"""Random kills: in each of many runs one process is killed or stopped at a random moment, and nothing is left.

    python benchmarks/soak/kills.py [--runs 1000] [--minutes 60] [--first 0] [--at-once 3]

The runs are those of `make faults`, over DDP of Lightning, the hybrid pipeline and the parameter server in all its
modes, each started as programs (`popen`), by fork and by spawn; each is checked for what its options promise. All is in
namespaces of its own (`unshare`, as root), so what is counted there before and after is theirs: processes, sockets of
any kind, segments of shared memory (in `/dev/shm` and of System V), and temporary files. Between these, twice a second,
the most of each that was seen.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ISOLATED = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && "$@"'
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--net", "--mount", "sh", "-c", ISOLATED, "sh"]
CLOSED = "06"  # TIME_WAIT: no process has it any more.
KINDS = ("processes", "sockets", "segments", "temporary files")


def count(temporary: Path) -> Counter[str]:
    """Count what exists in these namespaces, without this process and the shell that has started it."""
    counts = Counter({"processes": sum(name.isdigit() for name in os.listdir("/proc")) - 2})
    for name in ("unix", "tcp", "tcp6", "udp", "udp6"):
        lines = Path("/proc/net", name).read_text().splitlines()[1:]
        counts["sockets"] += sum(name == "unix" or line.split()[3] != CLOSED for line in lines)
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    counts["segments"] = len(os.listdir("/dev/shm")) + len(segments)
    counts["temporary files"] = sum(len(files) + len(folders) for _, folders, files in os.walk(temporary))
    return counts


def run(arguments: argparse.Namespace, temporary: Path, scratch: Path) -> tuple[int, Counter[str]]:
    """All runs; exit code of pytest, and the most that was seen."""
    environment = os.environ | {
        "CNNSTRATEGIES_FAULTS": str(arguments.runs),
        "CNNSTRATEGIES_FAULTS_FROM": str(arguments.first),
        "CNNSTRATEGIES_FAULTS_LOG": str(scratch / "log"),
        "CNNSTRATEGIES_FAULTS_UNTIL": str(time.time() + 60 * arguments.minutes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": str(temporary),
    }
    words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout=150", f"--basetemp={scratch / 'runs'}"]
    words += ["-o", "tmp_path_retention_policy=failed", f"--numprocesses={arguments.at_once}", "--maxschedchunk=2"]
    most: Counter[str] = Counter()
    with subprocess.Popen(
        [sys.executable, *words, "tests/strategies/test_random_faults.py"], cwd=ROOT, env=environment
    ) as pytest:
        while pytest.poll() is None:
            time.sleep(0.5)
            most |= count(temporary)
    return pytest.returncode, most


def table(log: Path) -> list[tuple[str, ...]]:
    """How the runs ended, by strategy and start."""
    lines = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
    rows = [("strategy", "started by", "runs", "killed", "stopped", "over before", "went on", "ended, naming it")]
    for kind in sorted({line[:2] for line in lines}):
        of_kind = [line for line in lines if line[:2] == kind]
        hows = Counter(how for _, _, _, how, _ in of_kind)
        ends = Counter(end for _, _, _, how, end in of_kind if how != "none in time")
        figures = (len(of_kind), hows["SIGKILL"], hows["SIGSTOP"], hows["none in time"])
        rows.append((*kind, *map(str, figures), str(ends["goes on"]), str(ends["ends and says who died"])))
    return rows


def main() -> None:
    """Run, count, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60, help="after which none begins")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--at-once", type=int, default=3, help="how many runs at a time")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.isolated:
        os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, __file__, *sys.argv[1:], "--isolated"])
    sys.argv.remove("--isolated")
    with tempfile.TemporaryDirectory(prefix="k") as temporary, tempfile.TemporaryDirectory() as scratch:
        before = count(Path(temporary))
        began = time.monotonic()
        code, most = run(arguments, Path(temporary), Path(scratch))
        minutes = (time.monotonic() - began) / 60
        time.sleep(5)  # The kernel closes what processes that have just ended had.
        after = count(Path(temporary))
        left = ", ".join(sorted(path.name for path in Path(temporary).iterdir())) or "nothing"
        rows = table(Path(scratch, "log"))
    runs = sum(int(row[2]) for row in rows[1:])
    counted = "\n".join(f"| {kind} | {before[kind]} | {most[kind]} | {after[kind]} |" for kind in KINDS)
    verdict = "all as promised" if code == 0 else f"NOT all as promised: pytest's exit code {code}"
    text = f"{__doc__}\n{runs:,} runs in {minutes:.0f} minutes, {verdict}.\n\n"
    text += f"| | before | most | after |\n|---|---|---|---|\n{counted}\n\n"
    text += f"Left in the temporary folder: {left}.\n"
    sys.path.append(str(HERE.parent / "pipeline"))
    from ranks import report

    report(HERE / "kills.md", "Random kills", text, rows)


if __name__ == "__main__":
    main()
