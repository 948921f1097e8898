"""What the system lets a process have: files, of which each connection is one, and threads."""

import resource
import threading

from cnnstrategies.errors import ConfigurationError

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
    """Raise this process's limit of open files as far as it may, so that strangers who connect keep no member out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{who} needs {count} open files, for its connections, and may have {hard}: raise the limit (`ulimit -Hn`, "
            "LimitNOFILE or limits.conf), or use fewer workers and servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_threads(processes: int) -> None:
    """Look whether this user may have the threads that so many processes will start: libzmq aborts without them."""
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
