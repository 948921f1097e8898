"""How a process allocates memory: the C library's heap, and Python's garbage collector.

libzmq allocates each received message by itself. With glibc's defaults a slice is often mapped, zeroed by the kernel
page by page, and given back. Measured in turn in one run, push and pull of 100 MB by 2 workers to 2 servers, slices of
2 MiB, median (range) of the milliseconds of a round:

- six runs, one I/O thread: neither function 205 (181 to 209) over TCP, 179 (156 to 188) over ipc; the servers' alone
  161 (151 to 182) and 126 (121 to 137); both 157 (155 to 170) and 120 (115 to 136);
- four runs, two I/O threads, the servers' on: without the workers' 164 (156 to 170) over TCP, 120 (105 to 130) over
  ipc; with it 148 (133 to 154) and 113 (108 to 119). Over ipc the workers' part is within the noise.

A pipeline's first stage frees the activations of several microbatches, one after the other; while all blocks are small,
glibc gives the top of its heap back each time. ResNet-20 on two stages, microbatches of 8 images of 32 x 32: 4,780 page
faults a step of the first stage, and 40 with the second function; 110 ms a step, and 102.
"""

import contextlib
import ctypes
import gc

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_STEP = 32 << 20  # the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Have a server keep the memory that messages leave, for the next ones; nothing happens without glibc.

    To be called before the process has other threads. One arena, because those of threads are given back as a whole
    when they are empty. What is kept is what was needed at once: the pushes of a step.

    The garbage collector leaves out what exists by now: it is the imported modules, and they stay.
    """
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_STEP)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def reuse_freed_memory() -> None:
    """Have a process that is the user's reuse the memory of slices and activations, and keep its settings.

    When glibc frees a large block it takes blocks of that size from the heap from then on, and keeps up to twice as
    much free memory there. Training does this by itself as soon as it frees a large activation; here it is done at
    once, with a block that is never touched.
    """
    torch.empty(_LARGEST_STEP - (1 << 20), dtype=torch.uint8)
