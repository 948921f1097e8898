"""An allocator's error on one rank becomes one line that names the rank, the step, the peaks and a remedy."""

import resource
import traceback
from types import SimpleNamespace

import pytest
import torch
from ranks import run_apart
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.commands.run.failures import explain_run_error
from cnnstrategies.runtime.out_of_memory import OutOfMemory, held_bytes, is_out_of_memory, line_of
from cnnstrategies.strategies.failing import FailTogether, last_line
from cnnstrategies.strategies.protocol import StrategyFacts

RECORD = OutOfMemory(1, "host-b", 7, "3,200 MB", "2.9 GiB: activations 2.0 GiB", "use a smaller batch")
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
@pytest.mark.parametrize(("kind", "start"), [("replica", "use --trainer.callbacks+=Act"), ("stages", "set the strat")])
def test_a_failed_rank_reports_what_it_has_held(kind: str, start: str) -> None:
    facts = {"step_kind": kind, "root_device": torch.device("cpu")}
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
    other = ValueError("boom")
    FailTogether().report(trainer, other)  # type: ignore[arg-type]
    assert line_of(other) is None
