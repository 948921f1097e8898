"""Settings of memory management: heap of the C library, and Python's garbage collector.

libzmq allocates memory for each received message. With glibc's defaults, glibc often returns the memory of a freed
message to the kernel, and the kernel has to map and zero the memory of the next message page by page.

Measurement: in a round, 2 workers push 100 MB to 2 servers and pull 100 MB, in slices of 2 MiB. The variants were run
in turn, six times with one I/O thread and four times with two I/O threads. The numbers are the median (and range) of
the time of a round, in milliseconds:

- One I/O thread, without the functions of this module: 205 (181 to 209) over TCP, 179 (156 to 188) over ipc.
- One I/O thread, `keep_freed_memory` in the servers: 161 (151 to 182) over TCP, 126 (121 to 137) over ipc.
- One I/O thread, also `reuse_freed_memory` in the workers: 157 (155 to 170) over TCP, 120 (115 to 136) over ipc.
- Two I/O threads, `keep_freed_memory` in the servers: 164 (156 to 170) over TCP, 120 (105 to 130) over ipc.
- Two I/O threads, also `reuse_freed_memory` in the workers: 148 (133 to 154) over TCP, 113 (108 to 119) over ipc. The
  difference over ipc is within the noise.

The first stage of a pipeline frees the activations of several microbatches one after the other. If all freed blocks are
small, glibc returns the top of its heap to the kernel after each block. With ResNet-20 on two stages and microbatches
of 8 images of 32 x 32 pixels, a step of the first stage had 4,780 page faults and took 110 ms. With
`reuse_freed_memory`, a step had 40 page faults and took 102 ms.
"""

import contextlib
import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # These constants are from glibc's malloc.h.
_LARGEST_STEP = 32 << 20  # Largest value in bytes that glibc accepts for M_MMAP_THRESHOLD.


def keep_freed_memory() -> None:
    """Make a server process keep the memory of freed messages for later messages. Without glibc this has no effect.

    Call this before the process starts other threads. The number of malloc arenas is set to one, because glibc returns
    a thread's arena to the kernel when the arena is empty. The process keeps as much memory as it has ever used. A
    server needs this memory for the pushes of every step.

    The function also excludes all existing objects from garbage collection (``gc.freeze``), because these objects
    belong to imported modules and exist until the process ends.
    """
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_STEP)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def reuse_freed_memory() -> None:
    """Make glibc reuse the memory of slices and activations in a user's process, without changing malloc's options.

    When a large block is freed, glibc raises its thresholds: from then on it takes blocks up to this size from the
    heap, and keeps up to twice as much free memory in the heap. In training this happens when the first large
    activation is freed. This function makes it happen at once: it allocates and frees a large block. The block does not
    use physical memory, because nothing is written to it. It is not a tensor, so torch's allocator does not count it.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes = [ctypes.c_void_p]
        library.free(library.malloc(_LARGEST_STEP - (1 << 20)))
