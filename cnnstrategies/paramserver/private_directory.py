"""Directories for a run's sockets and keys on one machine. Only the user who started the run can enter them.

Each process that uses a directory holds a lock on a file in it. The kernel releases the lock when the process ends. A
directory is in use while a process holds such a lock. Process ids cannot show whether a directory is in use, because
containers that share a temporary directory do not see each other's processes.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.security import KeyPair

PREFIX = "cnnstrategies-"
LONGEST = 50  # longest path of a temporary directory, in bytes; Linux allows 107 bytes for the path of a socket
_LOCK, _KEYS = "lock", "keys"
_held: dict[Path, int] = {}  # By directory: the file descriptor with this process's lock.


def temporary_place() -> Path:
    """Return the directory in which all private directories are created.

    This is the system's temporary directory. If its path is so long that the path of a socket file in it would exceed
    Linux's limit, as on some clusters, the directory is ``/tmp``.
    """
    place = Path(tempfile.gettempdir())
    return place if len(os.fsencode(place)) <= LONGEST else Path("/tmp")


def make_run_directory() -> Path:
    """Create and lock a directory for a run whose processes this process starts.

    Also remove the directories of earlier runs that no process uses any longer.
    """
    place = temporary_place()
    for existing in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if existing.lstat().st_uid == os.getuid() and (existing / _LOCK).exists():
                _remove_unused(existing)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    hold(path)
    return path


def shared_directory(rendezvous: str) -> Path:
    """Create and lock the directory that a run's separately started processes share on this machine.

    Args:
        rendezvous: A text that is equal in all processes of a run, and different in all other runs of this user.
    """
    digest = hashlib.sha256(rendezvous.encode()).hexdigest()[:16]
    path = temporary_place() / f"{PREFIX}{os.getuid()}-{digest}"
    hold(path)
    return path


def hold(path: Path) -> None:
    """Create a directory if it does not exist, and hold a lock on it until :func:`let_go` or the end of this process.

    Raises:
        ConfigurationError: The path is not a directory that only this user can enter.
    """
    while path not in _held:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigurationError(
                f"{path} is needed for sockets and keys, but it is not a directory that only this user can enter: "
                "remove it, or set TMPDIR to a different directory"
            )
        # Another process may have removed the directory meanwhile. Then the loop creates the directory again.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_in(lock, path):
                _held[path] = lock
            else:
                os.close(lock)


def let_go(path: Path) -> None:
    """Release this process's lock on a directory, and remove the directory if no other process holds a lock on it."""
    lock = _held.pop(path, None)
    if lock is not None:
        os.close(lock)
        with contextlib.suppress(FileNotFoundError):
            _remove_unused(path)


def keys_in(path: Path) -> str:
    """Return the path of the key file in a directory. If there is no key file yet, create one with a new key pair."""
    keys = path / _KEYS
    if not keys.exists():
        scratch = path / f"{_KEYS}-{os.getpid()}"
        KeyPair.create().save(scratch)
        with contextlib.suppress(FileExistsError):
            # Several processes may create the file at the same time. A link publishes a complete file atomically, and
            # fails if the file exists, so all processes use the same keys.
            os.link(scratch, keys)
        scratch.unlink()
    return str(keys)


def _is_in(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path / _LOCK))
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> None:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        # These two error numbers mean that another process holds the lock, so the directory stays.
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
    finally:
        os.close(lock)
