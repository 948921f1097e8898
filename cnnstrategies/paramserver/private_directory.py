"""A directory for the sockets and keys of one machine's processes, which only their user can enter.

Every process that uses such a directory holds a lock on it, which the kernel frees when the process ends. The lock
shows whether a directory is still in use, even by a process that is not visible here: containers may share a temporary
directory.
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
LONGEST = 50  # bytes of a temporary directory's path; Linux allows 107 bytes for a socket's whole path
_LOCK, _KEYS = "lock", "keys"
_held: dict[Path, int] = {}  # this process's locks by directory


def temporary_place() -> Path:
    """Return the directory in which all private directories are made.

    A cluster's temporary directory may have a path that is too long for the path of a socket.
    """
    place = Path(tempfile.gettempdir())
    return place if len(os.fsencode(place)) <= LONGEST else Path("/tmp")


def make_run_directory() -> Path:
    """Make a new directory for a run whose processes this one starts. Unused directories are removed."""
    place = temporary_place()
    for existing in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if existing.lstat().st_uid == os.getuid() and (existing / _LOCK).exists():
                _remove_unused(existing)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    hold(path)
    return path


def shared_directory(rendezvous: str) -> Path:
    """Return the directory of processes of this machine that are started separately and know only their rendezvous.

    Args:
        rendezvous: A text that is the same for all of these processes, and for no other run of this user.
    """
    digest = hashlib.sha256(rendezvous.encode()).hexdigest()[:16]
    path = temporary_place() / f"{PREFIX}{os.getuid()}-{digest}"
    hold(path)
    return path


def hold(path: Path) -> None:
    """Make a directory if it does not exist, and use it until this process ends or lets it go.

    Raises:
        ConfigurationError: Other users could enter the directory.
    """
    while path not in _held:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigurationError(
                f"{path} is not a directory that only this user can enter, but sockets and keys would be kept there: "
                "remove it, or set TMPDIR to another place"
            )
        with contextlib.suppress(FileNotFoundError):  # The directory's last user may just have removed it.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_in(lock, path):
                _held[path] = lock
            else:
                os.close(lock)


def let_go(path: Path) -> None:
    """Stop using a directory; the last process that uses it removes it."""
    lock = _held.pop(path, None)
    if lock is not None:
        os.close(lock)
        with contextlib.suppress(FileNotFoundError):
            _remove_unused(path)


def keys_in(path: Path) -> str:
    """Return the path of the file with the keys in a directory; the first process that asks makes the keys."""
    keys = path / _KEYS
    if not keys.exists():
        scratch = path / f"{_KEYS}-{os.getpid()}"
        KeyPair.create().save(scratch)
        with contextlib.suppress(FileExistsError):
            os.link(scratch, keys)  # The file appears complete, and never replaces another one.
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
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # With one of these errors the directory is in use.
            raise
    finally:
        os.close(lock)
