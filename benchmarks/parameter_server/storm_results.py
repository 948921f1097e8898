"""Results from the records of a storm: the work that was done, and the time of each recovery from a fault."""

from collections.abc import Sequence

from storm_faults import KINDS, Fault
from storm_host import Done, RepeatedDigits
from storm_watch import Seen

SETTLED = 2.0  # seconds after a run is whole again, for quiet to begin
QUIET = 3.0  # seconds of quiet that count, at least
STEADY = 2  # batches of a worker after a fault: the second has used what the first has made


def samples_of_epoch(repeats: int) -> int:
    """Training samples in an epoch."""
    data = RepeatedDigits(repeats)
    data.setup("fit")
    return len(data.train_source)


def useful(batches: Sequence[Sequence[Done]], size: int, began: float, ended: float) -> int:
    """Samples that were worked on between two moments. What is beyond an epoch's samples was worked on before.

    Args:
        batches: Of all hosts.
        size: Samples of an epoch.
        began: The first moment, in seconds.
        ended: The second.
    """
    counted: dict[int, int] = {}
    useful_samples = 0
    for at, epoch, samples in sorted(batch for host in batches for batch in host):
        before = counted.get(epoch, 0)
        counted[epoch] = min(size, before + samples)
        if began <= at < ended:
            useful_samples += counted[epoch] - before
    return useful_samples


def quiet(
    batches: Sequence[Sequence[Done]], size: int, hits: Sequence[tuple[float, float | None]], began: float, ended: float
) -> float:
    """Samples per second between faults, while the run is whole.

    Args:
        batches: Of all hosts.
        size: Samples of an epoch.
        hits: When each fault began, in seconds, and in how many seconds the run was whole again.
        began: When the storm began.
        ended: When it was over.
    """
    starts = [began, *(ended if took is None else at + took + SETTLED for at, took in hits)]
    spans = list(zip(starts, [*(at for at, _ in hits), ended], strict=True))
    spans = [(start, stop) for start, stop in spans if stop - start >= QUIET]
    return sum(useful(batches, size, *span) for span in spans) / sum(stop - start for start, stop in spans)


def trains(batches: Sequence[Sequence[Done]], after: float) -> float | None:
    """When all workers had done some batches after a moment; None if one has not."""
    later = [[batch.at for batch in host if batch.at > after] for host in batches]
    return max(host[STEADY - 1] for host in later) if all(len(host) >= STEADY for host in later) else None


def whole(fault: Fault, hit: float, batches: Sequence[Sequence[Done]], answers: Sequence[Seen] | None) -> float | None:
    """Seconds from the beginning of a fault until the run was whole again; None if it never was.

    Args:
        fault: What happened.
        hit: When it began, in seconds.
        batches: Of all hosts.
        answers: The coordinator's; None of a run without one.
    """
    over = hit + fault.seconds
    again = trains(batches, over)
    if again is None or answers is None:
        return None if again is None else again - hit
    kind = KINDS[fault.kind]
    before = max((answer for answer in answers if answer.at < hit), key=lambda answer: answer.at, default=None)
    for answer in answers:
        if answer.at <= over or len(answer.servers) < len(batches):
            continue
        if before is not None and kind.replaced:
            if kind.target in ("server", "link") and answer.servers[fault.host] <= before.servers.get(fault.host, -1):
                continue
            if kind.target == "coordinator" and answer.restarts <= before.restarts:
                continue
        return max(again, answer.at) - hit
    return None
