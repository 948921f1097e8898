"""Settings of a process's memory: the heap of the C library, and Python's garbage collector.

libzmq allocates memory for each received message. With glibc's defaults the memory of a slice is often mapped, zeroed
by the kernel page by page, and returned to the kernel. This measurement is a push and a pull of 100 MB by 2 workers to
2 servers, with slices of 2 MiB; the cases took turns in one run. Median (range) of a round in milliseconds:

- Six runs with one I/O thread. Neither function: 205 (181 to 209) over TCP, 179 (156 to 188) over ipc. Only
  `keep_freed_memory` in the servers: 161 (151 to 182) and 126 (121 to 137). Also `reuse_freed_memory` in the workers:
  157 (155 to 170) and 120 (115 to 136).
- Four runs with two I/O threads and `keep_freed_memory` in the servers. Without `reuse_freed_memory` in the workers:
  164 (156 to 170) over TCP, 120 (105 to 130) over ipc. With it: 148 (133 to 154) and 113 (108 to 119). Over ipc the
  difference is within the noise.

A pipeline's first stage frees the activations of several microbatches one after the other. While all blocks are small,
glibc returns the top of its heap to the kernel each time. ResNet-20 on two stages, microbatches of 8 images of 32 x 32:
4,780 page faults and 110 ms in a step of the first stage; 40 page faults and 102 ms with `reuse_freed_memory`.
"""

import contextlib
import ctypes
import gc

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGEST_STEP = 32 << 20  # the largest threshold that glibc accepts, in bytes


def keep_freed_memory() -> None:
    """Make a server keep the memory of freed messages for the next messages; nothing happens without glibc.

    Call this function before the process has other threads. It allows one arena, because glibc returns an empty arena
    of a thread to the kernel as a whole. The server keeps as much memory as it has needed at once: the pushes of a
    step.

    The garbage collector skips all objects that exist at the call: they belong to imported modules, which stay.
    """
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_STEP)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def reuse_freed_memory() -> None:
    """Make a user's process reuse the memory of slices and activations, without changing the process's settings.

    After glibc has freed a large block it takes blocks of that size from the heap, and keeps up to twice as much free
    memory there. Training reaches this state when it frees a large activation. This function reaches it at once, with a
    block that is never touched.
    """
    torch.empty(_LARGEST_STEP - (1 << 20), dtype=torch.uint8)
