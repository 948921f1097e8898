"""A finding of the guard: something in a training that is wrong, with its likely cause and remedy."""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        check: Name of the check, as in the table of the documentation.
        rank: Rank on which it was found.
        step: Number of steps of the run before the check.
        tensor: Name of the parameter, the buffer, the module, or another value.
        fault: What is wrong, as the end of a sentence that begins with the tensor.
        cause: Likely cause.
        remedy: What to do.
        is_note: Whether the finding is only printed, and does not stop the run.
    """

    check: str
    rank: int
    step: int
    tensor: str
    fault: str
    cause: str
    remedy: str
    is_note: bool = False

    @property
    def key(self) -> int:
        """A positive number that is equal for equal faults on different ranks and at different steps."""
        return zlib.crc32(f"{self.check} {self.tensor}".encode()) + 1

    def __str__(self) -> str:
        kind = "guard: note" if self.is_note else "guard"
        return (
            f"{kind}: rank {self.rank}, step {self.step}: {self.tensor} {self.fault}; likely cause: {self.cause}; "
            f"{self.remedy}"
        )


def and_others(names: list[str]) -> str:
    """Return the first name, and the number of the others."""
    return names[0] + (f" (and {len(names) - 1} others)" if len(names) > 1 else "")
