"""Run a function on several processes of this machine, or of several network namespaces."""

import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
import time
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
    return run_groups(world, [(function, args)])[0]


def run_groups(world: int, calls: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> list[list[Any]]:
    """The same for several functions at once, each in ``world`` processes and with a gloo group of its own."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world, f"{folder}/{group}", (group, rank), queue, function, args)
            )
            for group, (function, args) in enumerate(calls)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            results = dict(queue.get() for _ in processes)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failed = [text for ok, text in results.values() if not ok]
    if failed:
        raise SystemExit(failed[0])
    return [[results[group, rank][1] for rank in range(world)] for group in range(len(calls))]


def run_contest(world: int, contestants: Sequence[Callable[[int], Callable[[], Any]]], rounds: int) -> list[list[Any]]:
    """Steps of contestants that each have ``world`` processes of their own, so that none lives in another's memory.

    In each round every contestant makes one step, in an order that changes, while the others sleep. Two rounds before
    the measured ones warm up.

    Args:
        world: Processes of each contestant.
        contestants: Given the rank, what makes one step of it.
        rounds: How many are measured.

    Returns:
        For each contestant what its ranks measured: seconds of each step, and their processor time.
    """
    turns = mp.get_context("fork").Barrier(world * len(contestants))
    return run_groups(
        world, [(_contestant, (turns, place, len(contestants), make, rounds)) for place, make in enumerate(contestants)]
    )


def _contestant(
    rank: int, turns: Any, place: int, number: int, make: Callable[[int], Callable[[], Any]], rounds: int
) -> tuple[list[float], list[float], Any]:
    """This rank's seconds and processor time of each measured step, and what the first step returned."""
    step = make(rank)
    first = step()
    order = random.Random(0)  # The same in all processes.
    times, worked = [], []
    for index in range(2 + rounds):
        for turn in order.sample(range(number), number):
            turns.wait()
            if turn == place:
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                step()
                cpu = time.process_time() - cpu
                dist.barrier()
                if index >= 2:
                    times.append(time.perf_counter() - start)
                    worked.append(cpu)
    return times, worked, first


def _rank_main(
    rank: int, world: int, rendezvous: str, sender: Any, queue: Any, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=TIMEOUT
        )
        queue.put((sender, (True, function(rank, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        queue.put((sender, (False, traceback.format_exc())))


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
