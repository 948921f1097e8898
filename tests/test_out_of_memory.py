"""An allocator's error on one rank becomes one line that names the rank, the step, the peaks and a remedy."""

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import tempfile
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.commands.run.failures import explain_run_error
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.runtime.memory_records import MemoryRecord, killed_sibling, last_record, record_predictions
from cnnstrategies.runtime.out_of_memory import OutOfMemory, held_bytes, is_out_of_memory, line_of, plan_that_fits
from cnnstrategies.runtime.processes import ended_by, one_refusal
from cnnstrategies.strategies.failing import FailTogether, last_line
from cnnstrategies.strategies.protocol import StrategyFacts
from tests.runner.ranks import run_apart

GIB = 2**30
RECORD = OutOfMemory("rank 1", "host-b", 7, "3,200 MB", "2.9 GiB: activations 2.0 GiB", "use a smaller batch")
LINE = (
    "rank 1 on host-b has run out of memory in step 7: it had held 3,200 MB (predicted: 2.9 GiB: activations 2.0 GiB)"
)


def exhausted(limit: int, size: int) -> BaseException:
    """Return the error of an allocation that a limit on the process's address space does not allow."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        torch.empty(size, dtype=torch.uint8)
    except Exception as error:
        return error
    raise AssertionError("the allocation has succeeded")


def test_a_real_allocators_error_is_explained_in_a_rank_and_in_the_process_that_has_started_it() -> None:
    def run() -> list[str]:
        error = exhausted(2**43, 2**44)
        assert is_out_of_memory(error)
        RECORD.attach(error)
        RECORD.attach(error)
        text = "".join(traceback.format_exception(error))
        spawned = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 77)
        assert explain_run_error(spawned) == explain_run_error(error) == last_line(error)
        return [str(explain_run_error(error)), text]

    line, text = run_apart(run)
    assert line == f"{LINE}, and asked for {2**44} bytes more; use a smaller batch"
    assert text.count("has run out of memory") == 1


def test_a_killed_process_leaves_its_newest_record_until_the_run_has_ended(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    left = tmp_path / f"cnnstrategies_{ended_process()}_ab_1"
    left.touch()  # A record of a run that was killed.
    os.utime(left, (0, 0))
    fresh = tmp_path / f"cnnstrategies_{ended_process()}_cd_1"
    fresh.touch()

    def killed(rank: int = -1, available: int = 0) -> int:
        def run() -> None:
            record = MemoryRecord("use a smaller batch", rank, available, "host:1 folder")
            for step in range(20 if rank < 0 else 3):
                record.write(step)
            os.kill(os.getpid(), signal.SIGKILL)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        return process.pid or 0

    with one_refusal():
        assert not left.exists()
        fresh.unlink()  # Other ranks of its run may not have read it yet.
        server, rank = killed(), killed(1)
        text = ended_by(1, -signal.SIGKILL, server)
        end = r"it had held [\d,]+ MB of main memory; if memory has run out, use a smaller batch"
        assert re.search(rf"when memory runs out; in step 19 {end}$", text), text
        assert re.match(rf"in step 2 {end}$", last_record(rank))
        record_predictions(["1 MiB"])
        assert "predicted" not in last_record(rank), "the prediction of another rank"
        record_predictions(["1 MiB", "2 MiB: images 2 MiB"])
        assert "main memory (predicted: 2 MiB: images 2 MiB); if" in last_record(rank)
        whole, half = 8 * GIB, 3 * GIB
        record_predictions(["1 MiB"] * 2, [("", [whole, whole]), ("half of it", [half, half])])
        plan = r"a plan that fits by prediction: half of it \(3,221 MB beside the parameters\)"
        assert re.search(rf"if memory has run out, {plan}$", last_record(killed(1, held_bytes() + 4 * GIB)))
        assert last_record(killed(1, held_bytes() + 2 * GIB)).endswith("use a smaller batch")
        assert re.match(rf"in step 19 {end}$", last_record(server)), "the prediction of a rank"
        assert last_record(1) == ""
        assert ended_by(1, -signal.SIGTERM, rank) == "rank 1 was ended by SIGTERM"
        next(tmp_path.glob(f"*_{rank}")).write_bytes(b"damaged")
        assert last_record(rank) == ""
        # What other ranks of the same launcher read. Of the killed ranks, one has a damaged record, and two are left.
        assert run_apart(lambda: killed_sibling("host:1 other")) is None, "a rank of another run"
        *siblings, nothing = [run_apart(lambda: killed_sibling("host:1 folder")) for _ in range(3)]
        assert nothing is None, "each of them is found once"
        for number, text in siblings:
            assert number == 1
            assert text.startswith("in step 2 it had held ")
    assert not list(tmp_path.iterdir())
    assert last_record(server) == ""
    MemoryRecord("").write(1)  # Outside of a run there is no record.
    assert not list(tmp_path.iterdir())


@pytest.mark.light
def test_the_first_plan_that_fits_is_named() -> None:
    plans = [("", [100, 80]), ("little", [95, 80]), ("moved", [50, 99]), ("half", [50, 40]), ("quarter", [25, 20])]
    assert plan_that_fits(plans, 0, 1000).startswith("a plan that fits by prediction: half ("), "100 did not fit"
    assert plan_that_fits(plans, 0, 100 * 11 // 10).startswith("a plan that fits by prediction: half (")
    assert plan_that_fits(plans, 0, 54).startswith("a plan that fits by prediction: quarter (")
    assert plan_that_fits(plans, 1, 1000).startswith("a plan that fits by prediction: half (")
    assert plan_that_fits(plans, 0, 20) == plan_that_fits([], 0, 20) == ""


def ended_process() -> int:
    program = subprocess.Popen(["true"])
    program.wait()
    return program.pid


@pytest.mark.light
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: not enough memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ValueError("out of memory"), False),
        (RuntimeError("boom"), False),
    ],
)
def test_reports_of_allocators_are_told_from_other_errors(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert line_of(error) is None
    wrapped = ValueError("the step has failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected
    if expected:
        RECORD.attach(error)
        line = explain_run_error(wrapped)
        assert line is not None
        assert line.startswith(LINE)
        if isinstance(error, torch.OutOfMemoryError):
            assert "asked for 20.00 GiB more" in line
    else:
        assert explain_run_error(wrapped) is None


@pytest.mark.light
@pytest.mark.parametrize(
    ("kind", "ranks", "start"),
    [
        ("replica", 1, "use --trainer.callbacks+=Act"),
        ("replica", 2, "use --trainer.callbacks+=ActivationCheckpointing, or more parts"),
        ("stages", 1, "set the strat"),
    ],
)
def test_a_failed_rank_reports_what_it_has_held(kind: str, ranks: int, start: str) -> None:
    facts = {"step_kind": kind, "ranks_per_batch": ranks, "root_device": torch.device("cpu")}
    strategy = type("Strategy", (StrategyFacts,), facts)()
    trainer = SimpleNamespace(
        strategy=strategy, global_rank=3, global_step=12, callbacks=[], accumulate_grad_batches=2, world_size=1
    )
    error = MemoryError()
    FailTogether().report(trainer, error)  # type: ignore[arg-type]
    line = line_of(error)
    assert line is not None
    assert line.startswith("rank 3 on ")
    assert f"in step 12: it had held {held_bytes() / 1e6:,.0f}"[:26] in line
    assert f"; {start}" in line
    ended = RunEnded("server 0 failed: it has run out of memory")
    FailTogether().report(trainer, ended)  # type: ignore[arg-type]
    assert line_of(ended) is None, "this rank has not run out of memory"
    other = ValueError("boom")
    FailTogether().report(trainer, other)  # type: ignore[arg-type]
    assert line_of(other) is None
