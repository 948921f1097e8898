"""How many files a process may have open: each connection is one, and what is over the limit is not heard of."""

import resource

from cnnstrategies.errors import ConfigurationError

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
    """Raise this process's limit of open files to what it needs, if it is lower.

    Args:
        count: How many it needs.
        who: Whose they are, for the error.

    Raises:
        ConfigurationError: The system does not let it have as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{who} needs {count} open files, for its connections, and may have {hard}: raise the limit (`ulimit -Hn`, "
            "LimitNOFILE or limits.conf), or use fewer workers and servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
