"""A directory for the sockets and keys of one machine's processes, that only their user can enter.

Every process that uses one holds a lock on it, which the kernel frees when it ends. So what nobody uses any more can be
told from what a process uses that is not visible here: containers may share a temporary directory.
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
LONGEST = 50  # Bytes of a temporary directory: with what follows, Linux takes 107.
_LOCK, _KEYS = "lock", "keys"
_held: dict[Path, int] = {}  # locks of this process


def temporary_place() -> Path:
    """Where they lie: a socket's path cannot be long, as those of the temporary directories of clusters are."""
    place = Path(tempfile.gettempdir())
    return place if len(os.fsencode(place)) <= LONGEST else Path("/tmp")


def make_run_directory() -> Path:
    """A new directory, for a run whose processes this one starts; those that nobody uses any more are removed."""
    place = temporary_place()
    for old in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid() and (old / _LOCK).exists():
                _remove_unused(old)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    hold(path)
    return path


def shared_directory(meeting: str) -> Path:
    """The directory of processes of this machine that something else starts, and that know only where they meet.

    Args:
        meeting: What is the same for all of them, and for no other run of this user's.
    """
    digest = hashlib.sha256(meeting.encode()).hexdigest()[:16]
    path = temporary_place() / f"{PREFIX}{os.getuid()}-{digest}"
    hold(path)
    return path


def hold(path: Path) -> None:
    """Make a directory if it is not there, and use it until this process ends or lets it go.

    Raises:
        ConfigurationError: Others could enter it.
    """
    while path not in _held:
        path.mkdir(mode=0o700, exist_ok=True)
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise ConfigurationError(
                f"{path} is not a directory that this user alone can enter, and sockets and keys would lie there: "
                "remove it, or set TMPDIR to another place"
            )
        with contextlib.suppress(FileNotFoundError):  # The last one that used it has just removed it.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_in(lock, path):
                _held[path] = lock
            else:
                os.close(lock)


def let_go(path: Path) -> None:
    """Use a directory no longer; the last one removes it."""
    lock = _held.pop(path, None)
    if lock is not None:
        os.close(lock)
        with contextlib.suppress(FileNotFoundError):
            _remove_unused(path)


def keys_in(path: Path) -> str:
    """The file with the keys in a directory; the first process that asks makes them."""
    keys = path / _KEYS
    if not keys.exists():
        scratch = path / f"{_KEYS}-{os.getpid()}"
        KeyPair.create().save(scratch)
        with contextlib.suppress(FileExistsError):
            os.link(scratch, keys)  # Whole, and never over another's.
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
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # Else somebody uses it.
            raise
    finally:
        os.close(lock)
