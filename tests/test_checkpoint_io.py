"""A checkpoint file is always the whole old checkpoint or the whole new one, never a part."""

import contextlib
import errno
import os
import resource
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch

from cnnstrategies import ConfigurationError
from cnnstrategies.checkpoints.io import AtomicCheckpointIO


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("cannot be stored")


@pytest.mark.light
def test_a_failing_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    large = {"step": 2, "weights": torch.zeros(500_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # The disk is full while the file is written,
    try:
        with pytest.raises(ConfigurationError, match=f"cannot write {path}: File too large; free some space"):
            io.save_checkpoint(large, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)  # or only when the file is flushed at the end.
    with pytest.raises(ConfigurationError, match=f"cannot write {path}: No space left on device; free some space"):
        io.save_checkpoint(large, path)
    with pytest.raises(RuntimeError, match="cannot be stored"):
        io.save_checkpoint({"step": 2, "bad": Unpicklable()}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert io.load_checkpoint(path, weights_only=True) == {"step": 1}
    tmp_path.chmod(0o500)
    if os.geteuid():  # The root user may write everywhere.
        with pytest.raises(ConfigurationError, match="Permission denied"):
            io.save_checkpoint(large, tmp_path / "new" / "last.ckpt")
    tmp_path.chmod(0o700)


@pytest.mark.light
def test_a_changed_bit_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1, "weights": torch.arange(5000.0)}, path)
    content = path.read_bytes()
    detected = []
    places = range(0, len(content), 397)
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with contextlib.suppress(ConfigurationError):
            loaded = io.load_checkpoint(path)
            assert loaded["step"] == 1
            assert torch.equal(loaded["weights"], torch.arange(5000.0))
            continue
        detected.append(place)
    assert len(detected) > 0.9 * len(places)  # The other places are padding between the entries.
    path.write_bytes(content[:9000] + b"?" + content[9001:])
    with pytest.raises(ConfigurationError, match=rf"{path} is damaged: the checksum of archive/data/0 is wrong"):
        io.load_checkpoint(path)


class RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("it has run"),)


@pytest.mark.light
def test_a_file_that_is_not_a_checkpoint_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "some.ckpt"
    torch.save({"weights": torch.zeros(5000)}, path)
    archive = path.read_bytes()
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("readme.txt", "nothing")
    other_archive = path.read_bytes()
    torch.save({"a": RunsCode()}, path)
    for content, message in (
        (path.read_bytes(), r"\(getattr\): if you trust .* add --weights_only=false"),
        (archive[:9000], "is truncated after 9,000 bytes, because copying did not finish: copy it again"),
        (b"a page that says: not found", "is not a checkpoint: it begins with b'a page that says'"),
        (b"", "is empty"),
        (other_archive, "cannot be read: RuntimeError: "),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=f"ckpt_path: {path} .*{message}"):
            AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "nowhere.ckpt")
    with pytest.raises(ConfigurationError, match=r"http://host/last\.ckpt is a URL, .*: download the file"):
        AtomicCheckpointIO().load_checkpoint("http://host/last.ckpt")


def test_kills_at_any_moment_leave_a_whole_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": -1, "weights": torch.full((1,), -1.0)}, path)
    newest = -1
    attempt = 0
    while attempt < 8 or newest <= 3:  # A busy machine writes slowly, and then needs more attempts.
        attempt += 1
        assert attempt < 200
        pid = os.fork()
        if pid == 0:
            step = newest
            while True:
                step += 1
                io.save_checkpoint({"step": step, "weights": torch.full((500_000,), float(step))}, path)
        time.sleep(0.05 + 0.013 * (attempt % 8) + 0.005 * max(0, attempt - 8))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stored = torch.load(path, weights_only=True)
        assert stored["step"] >= newest
        assert (stored["weights"] == stored["step"]).all()
        newest = stored["step"]
    io.save_checkpoint({"step": newest}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"], "the partial files of killed processes are gone"
