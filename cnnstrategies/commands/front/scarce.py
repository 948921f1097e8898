"""One line for an error that says, in whose words ever, that a limit of the system is reached.

Without torch, whose import may be what fails.
"""

import re
import resource

# What is said, the limit, what it counts, and the letter by which ulimit knows it.
LIMITS = (
    (r"Too many open files", resource.RLIMIT_NOFILE, "open files", "n"),
    (
        r"can't start new thread|^(\[Errno 11\] )?Resource temporarily unavailable",
        resource.RLIMIT_NPROC,
        "threads",
        "u",
    ),
    (
        r"[Cc]an(no|')t allocate memory|could not create a primitive|bad_alloc|failed to map segment",
        resource.RLIMIT_AS,
        "bytes of addresses",
        "v",
    ),
)


def scarce(error: BaseException) -> str | None:
    """The line that names the limit; None where the error speaks of none that this process has."""
    said = "Cannot allocate memory" if type(error) is MemoryError else str(error)
    for words, limit, what, letter in LIMITS:
        most, _ = resource.getrlimit(limit)
        if (found := re.search(words, said)) and most != resource.RLIM_INFINITY:
            return (
                f"{found[0]}: this process, or its user, may have {most:,} {what} (ulimit -{letter}): allow more, or "
                "take fewer processes and data workers"
            )
    return None
