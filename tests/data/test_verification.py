"""Each file is decoded once, until it changes."""

import os
from pathlib import Path

import pytest
from PIL import Image

from cnnstrategies.data import folders
from cnnstrategies.data.folders import broken_images, cache_file


@pytest.fixture
def names():
    for number in range(10):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(f"{number}.jpg")
    Path("3.jpg").write_bytes(b"")
    Path("7.jpg").write_bytes(b"text")
    return [f"{number}.jpg" for number in range(10)]


@pytest.fixture
def decoded(monkeypatch):
    """Names of the files that are decoded, by the real decoder."""
    seen = []
    real = folders.decode

    def decode(path):
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(folders, "decode", decode)
    return seen


def test_broken_files_are_found_and_good_ones_decoded_once(names, decoded):
    broken = broken_images(Path("."), names)
    assert list(broken) == ["3.jpg", "7.jpg"]
    assert "cannot identify" in broken["3.jpg"]
    assert sorted(decoded) == names
    decoded.clear()
    assert broken_images(Path("."), names) == broken
    assert sorted(decoded) == ["3.jpg", "7.jpg"]


def test_a_changed_file_and_a_new_one_are_checked(names, decoded):
    broken_images(Path("."), names)
    decoded.clear()
    Path("5.jpg").write_bytes(b"now broken")
    Image.new("RGB", (8, 8)).save("3.jpg")
    Image.new("RGB", (8, 8)).save("new.jpg")
    assert list(broken_images(Path("."), [*names, "new.jpg"])) == ["5.jpg", "7.jpg"]
    assert sorted(decoded) == ["3.jpg", "5.jpg", "7.jpg", "new.jpg"]


def test_a_moved_directory_need_not_be_checked_again(names, decoded):
    os.mkdir("old")
    for name in names:
        os.rename(name, f"old/{name}")
    broken_images(Path("old"), names)
    os.rename("old", "new")
    decoded.clear()
    broken_images(Path("new"), names)
    assert sorted(decoded) == ["3.jpg", "7.jpg"]


def test_the_cache_lies_with_the_data_or_where_one_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_file(tmp_path) == tmp_path / ".checked_images"
    # What does not exist cannot be written to, not even by root.
    one, other = cache_file(tmp_path / "one"), cache_file(tmp_path / "other")
    assert one.parent == other.parent == tmp_path / "cache/cnnstrategies"
    assert one != other


def test_a_missing_file_is_broken(names):
    assert "No such file" in broken_images(Path("."), [*names, "gone.jpg"])["gone.jpg"]
