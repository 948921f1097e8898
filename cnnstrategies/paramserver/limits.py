"""What the system lets a process have: files, of which each connection is one, and memory.

libzmq puts a message's parts together before anybody can count them, so a peer whose message never ends takes memory
without end. The wall against that is the system's: when libzmq gets no more, it drops the connection.
"""

import os
import resource
import threading
from pathlib import Path

from cnnstrategies.errors import ConfigurationError

GIB = 1 << 30

THREADS = 8  # of a process with its own, libzmq's and torch's, about
OWN_FILES = 256  # of a process besides its connections: its program, its data, libzmq's own


def files_of_coordinator(workers: int, servers: int) -> int:
    """Files of a coordinator: a connection of each member, and one for each supervision's question."""
    return OWN_FILES + 2 * workers + 2 * servers


def files_of_server(workers: int, servers: int) -> int:
    """Files of a server: a connection of each worker, and one in each direction with a socket for each server."""
    return OWN_FILES + 2 * workers + 4 * servers


def files_of_worker(servers: int) -> int:
    """Files of a worker, beside what training opens: a connection and a socket for each server."""
    return OWN_FILES + 4 * servers


def allow_files(count: int, who: str) -> None:
    """Raise this process's limit of open files as far as it may, so that strangers who connect keep no member out.

    Args:
        count: How many it needs itself.
        who: Whose they are, for the error.

    Raises:
        ConfigurationError: The system does not let it have as many.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{who} needs {count} open files, for its connections, and may have {hard}: raise the limit (`ulimit -Hn`, "
            "LimitNOFILE or limits.conf), or use fewer workers and servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_threads(processes: int) -> None:
    """Look whether this user may have the threads that so many processes will start: libzmq aborts without them.

    Args:
        processes: How many are to be started.

    Raises:
        ConfigurationError: The system does not let it have as many.
    """
    go_on, size = threading.Event(), threading.stack_size(1 << 16)
    threads = [threading.Thread(target=go_on.wait) for _ in range(processes * THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{processes} processes on this machine need some {len(threads)} threads, and this user may not have "
            "so many more: raise the limit (`ulimit -u`, TasksMax or pids.max), or use fewer workers or servers"
        ) from error
    finally:
        go_on.set()
        threading.stack_size(size)
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def memory_of_server(slices: int, held: int, workers: int, payload: int) -> int:
    """Bytes that a server may come to need, all told and some more.

    Args:
        slices: Bytes of all the slices that it holds, as primary and backup.
        held: Copies of them that the optimizer's state and replication need at most.
        workers: How many push.
        payload: Bytes of the largest message.
    """
    own = slices * (2 + 2 * held)  # with the copies for another server that wait to leave
    pushes = 2 * 2 * workers * slices  # of this step and the next, in the largest encoding
    waiting = workers * 64 * payload  # that libzmq keeps unread
    return GIB + own + pushes + waiting


def memory_of_coordinator() -> int:
    """Bytes that a coordinator may need: it does not know what workers will gather."""
    return max(4 * GIB, _machine() // 4)


def allow_memory(more: int) -> None:
    """Let this process have so many bytes more than it has now, and never more than the machine."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    has = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = has + min(more, _machine())
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
