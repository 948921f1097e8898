"""Run a function on several processes of this machine, or of several network namespaces."""

import datetime
import os
import platform
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(minutes=10)


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` in forked processes with a gloo group; their results by rank."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, world, folder, queue, function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            results = dict(queue.get() for _ in range(world))
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failed = [text for ok, text in results.values() if not ok]
    if failed:
        raise SystemExit(failed[0])
    return [results[rank][1] for rank in range(world)]


def _rank_main(rank: int, world: int, folder: str, queue: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=TIMEOUT
        )
        queue.put((rank, (True, function(rank, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        queue.put((rank, (False, traceback.format_exc())))


ONE_THREAD = "gloo, one thread per process"


def report(path: Path, title: str, text: str, rows: Sequence[Sequence[str]], how: str = ONE_THREAD) -> None:
    """Print a result page and write it as Markdown; the first row is the heading."""
    heading, *body = rows
    lines = [f"# {title}", "", text.strip(), "", "| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    command = f"python {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    folder = Path(sys.argv[0]).resolve().parent.relative_to(Path(__file__).resolve().parents[2])
    lines += ["", f"{machine(how)} Command: `{command}`, in `{folder}`."]
    page = "\n".join(lines) + "\n"
    print(page)
    path.write_text(page, encoding="utf-8")


def machine(how: str = ONE_THREAD) -> str:
    """Machine, versions and date in a sentence."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return (
        f"Machine: {cpu}, {os.cpu_count()} cores, shared with other work, {platform.system()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, {how}; "
        f"{datetime.date.today():%d %B %Y}."
    )


def medians(samples: Sequence[Sequence[float]]) -> list[float]:
    """The median of each variant's samples."""
    return [statistics.median(each) for each in samples]


def sh(command: str) -> None:
    """Run a shell command that must succeed."""
    subprocess.run(command, shell=True, check=True)
