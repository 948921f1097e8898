"""Images that cannot be decoded: refused by name, or found once and left out on every rank."""

import os
import warnings
from pathlib import Path

import pytest
from PIL import Image
from test_modules import make_folder, names_of, set_up

from cnnstrategies import ConfigurationError
from cnnstrategies.data import ImageFolderDataModule, folders
from cnnstrategies.data.folders import broken_images, cache_file

pytestmark = pytest.mark.light
BROKEN = ("cat/2.JPG", "dog/0.JPG", "eel/1.png")


def broken_folder(part):
    make_folder("images", (part,))
    damage = (b"", Path("images", part, BROKEN[1]).read_bytes()[:300], b"not an image")
    for name, data in zip(BROKEN, damage, strict=True):
        Path("images", part, name).write_bytes(data)


def images(**options):
    return ImageFolderDataModule(Path("images"), image_size=16, batch_size=2, num_workers=0, **options)


def fetch_all(module):
    for source in (module.train_source, module.val_source):
        source.fetch(list(range(len(source))))


def test_a_broken_image_is_refused_by_its_path_in_one_line():
    broken_folder("train")
    message = r"^broken image images/train/\w+/\d\.\w+ \(.*\): repair or remove it, or set .*on_broken=skip$"
    with pytest.raises(ConfigurationError, match=message):
        list(set_up(images()).train_dataloader())
    module = images(on_broken="skip")
    module.prepare_data()
    with pytest.warns(UserWarning, match="3 broken image files"):
        module.setup("fit")
    Path("images/train/dog/2.JPG").unlink()
    with pytest.raises(ConfigurationError, match=r"images/train/dog/2.JPG \(No such file.*remove it and start again$"):
        fetch_all(module)


def test_broken_images_are_reported_once_and_move_no_other():
    broken_folder(".")
    whole, module = set_up(images(val_split=1 / 3)), images(val_split=1 / 3, on_broken="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.prepare_data()
        module.setup("fit")
        module.setup("validate")
    (report,) = (str(one.message) for one in caught)
    assert report.startswith("3 broken image files are left out")
    assert all(report.count(f"images/{name}:") == 1 for name in BROKEN)
    for part in ("train_source", "val_source"):
        expected = [name for name in names_of(getattr(whole, part)) if not name.endswith(BROKEN)]
        assert names_of(getattr(module, part)) == expected
    count = len(module.train_source)
    for _ in range(2):
        sizes = [len(targets) for _, targets in module.train_dataloader()]
        assert sizes == [2] * (count // 2) + [1] * (count % 2), "good images in full batches"
    for path in Path("images").rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"all \d+ images for train are broken, the first is cat/"):
        images(on_broken="skip").setup("fit")


def test_each_file_is_decoded_once_until_it_changes(monkeypatch):
    names, decoded, decode = [f"{number}.jpg" for number in range(10)], [], folders.decode
    monkeypatch.setattr(folders, "decode", lambda path: decoded.append(path.name) or decode(path))
    os.mkdir("old")
    for number, name in enumerate(names):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(f"old/{name}")
    Path("old/3.jpg").write_bytes(b"")
    Path("old/7.jpg").write_bytes(b"text")

    def check(folder, names, expected):
        decoded.clear()
        found = broken_images(Path(folder), names)
        assert sorted(decoded) == expected
        return found

    broken = check("old", names, names)
    assert list(broken) == ["3.jpg", "7.jpg"]
    assert "cannot identify" in broken["3.jpg"]
    os.rename("old", "new")
    assert list(check("new", names, ["3.jpg", "7.jpg"])) == list(broken), "good files are known by their names there"
    Path("new/5.jpg").write_bytes(b"now broken")
    for name in ("3.jpg", "new.jpg"):
        Image.new("RGB", (8, 8)).save(f"new/{name}")
    broken = check("new", [*names, "new.jpg", "gone.jpg"], ["3.jpg", "5.jpg", "7.jpg", "new.jpg"])
    assert list(broken) == ["5.jpg", "7.jpg", "gone.jpg"]
    assert "No such file" in broken["gone.jpg"]


def test_the_cache_lies_with_the_data_or_where_one_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_file(tmp_path) == tmp_path / ".checked_images"
    # What does not exist cannot be written to, not even by root.
    one, other = cache_file(tmp_path / "one"), cache_file(tmp_path / "other")
    assert one.parent == other.parent == tmp_path / "cache/cnnstrategies"
    assert one != other
