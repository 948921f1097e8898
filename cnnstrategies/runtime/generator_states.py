"""States of the random number generators from which a network's code draws without naming a generator."""

import ctypes
import hashlib
import random
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class GeneratorStates(NamedTuple):
    """States of the random number generators of this process.

    Attributes:
        cpu: torch's generator for the CPU.
        python: The module `random`.
        numpy: The module `numpy.random`.
        device: torch's generator for a device; None if the device is the CPU.
    """

    cpu: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    device: Tensor | None

    @classmethod
    def current(cls, device: torch.device | None = None) -> "GeneratorStates":
        """Return the current states.

        Args:
            device: The device; by default the GPU that this process uses, or the CPU if it has not used a GPU.
        """
        generator = generator_of(used_device() if device is None else device)
        return cls(
            torch.default_generator.get_state(),
            random.getstate(),
            _numpy.state(),
            None if generator is None else generator.get_state(),
        )

    def restore(self, device: torch.device | None = None) -> None:
        """Set the generators to these states. The argument is that of :meth:`current`."""
        torch.default_generator.set_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        generator = generator_of(used_device() if device is None else device)
        if generator is not None and self.device is not None:
            generator.set_state(self.device)

    def changed(self, later: "GeneratorStates") -> set[str]:
        """Return the names of the generators whose states differ in two objects."""
        changes = {
            "cpu": not torch.equal(self.cpu, later.cpu),
            "python": self.python != later.python,
            # The last three numbers say which of the array's numbers the generator has used.
            "numpy": self.numpy is not later.numpy
            and (self.numpy[2:] != later.numpy[2:] or not np.array_equal(self.numpy[1], later.numpy[1])),
            "device": later.device is not None and (self.device is None or not self.device.equal(later.device)),
        }
        return {name for name, is_changed in changes.items() if is_changed}

    def digest(self, drawn: Collection[str]) -> bytes:
        """Return bytes that are equal on all ranks with equal states, and differ for different states.

        Python seeds the generator of the module `random` anew in each forked process. The generators of Python and
        NumPy therefore count only if the network draws from them.

        Args:
            drawn: Names of the generators from which the network has drawn in earlier calls.
        """
        result = hashlib.blake2b(self.cpu.numpy().tobytes(), digest_size=16)
        if "python" in drawn:
            result.update(repr((hash(self.python[1]), self.python[2])).encode())
        if "numpy" in drawn:
            result.update(self.numpy[1].tobytes() + repr(self.numpy[2:]).encode())
        if self.device is not None:
            result.update(self.device.numpy().tobytes())
        return result.digest()


class NumpyStates:
    """Reads the state of `numpy.random`, which takes NumPy 24 microseconds, only if the state has changed."""

    def __init__(self) -> None:
        # The words of the last state, and the state. Nobody may change it.
        self._last: tuple[bytes | None, tuple[Any, ...]] = None, ()

    def state(self) -> tuple[Any, ...]:
        """Return the state as `numpy.random.get_state` does: the same object as long as nobody has drawn."""
        words = self._words()
        if words is not None and words == self._last[0]:
            return self._last[1]
        state: Any = np.random.get_state()
        # The next normal number may be stored beside the words, and a draw of it leaves them.
        self._last = None if words is None or state[3] else words, state
        return self._last[1]

    def _words(self) -> bytes | None:
        """Return the memory of the generator; None if the user has replaced the generator by one of another kind."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return None
        return ctypes.string_at(generator.ctypes.state_address, _WORDS)


_WORDS = 4 * (624 + 1)  # Bytes of the words of an MT19937, and of the number of words that have been used.
_numpy = NumpyStates()


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator of a device; None if the device is the CPU."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None


def used_device() -> torch.device:
    """Return the GPU that this process uses; the CPU if it has not used a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
