"""Reading of COCO json, Pascal VOC xml and YOLO text files. Every mistake is an error with its place and remedy."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from cnnstrategies.data.boxes import BoxFormat, Corners, ReadBox, ReadImage, corners_of
from cnnstrategies.errors import ConfigurationError

COCO, VOC, YOLO = "coco", "voc", "yolo"
FORMATS: dict[str, BoxFormat] = {COCO: "xywh", VOC: "xyxy", YOLO: "cxcywh"}
ENTITIES = re.compile(rb"<!(?:DOCTYPE|ENTITY)", re.IGNORECASE)


def read_coco(file: Path, images: Path, box_format: BoxFormat | None) -> tuple[dict[Any, str], list[ReadImage]]:
    """Read a COCO json file.

    Args:
        file: The file.
        images: Folder to which the paths of the images are relative.
        box_format: Format of the boxes; None for ``xywh``.

    Returns:
        The names of the classes by their ids, in the order of the ids, and the images in the order of the file.

    Raises:
        ConfigurationError: The file is not COCO json, lists an image that does not exist, lists an image or an id
            twice, or has a box of an image or a class that is not listed.
    """
    content = _json(file)
    names: dict[Any, str] = {}
    for number, entry in enumerate(_entries(file, content, "categories")):
        place = f"{file}, categories[{number}]"
        identity, name = _field(place, entry, "id"), str(_field(place, entry, "name"))
        if identity in names or name in names.values():
            raise ConfigurationError(
                f"{place}: the id {identity} or the name {name!r} occurs twice; give it another one"
            )
        names[identity] = name
    listed: dict[Any, ReadImage] = {}
    for number, entry in enumerate(_entries(file, content, "images")):
        place = f"{file}, images[{number}]"
        identity, name = _field(place, entry, "id"), str(_field(place, entry, "file_name"))
        size = int(_number(place, entry, "height")), int(_number(place, entry, "width"))
        path = images / name
        if not path.is_file():
            raise ConfigurationError(f"{place}: {path} does not exist; put the image there, or remove the entry")
        if identity in listed:
            raise ConfigurationError(f"{place}: the id {identity} occurs twice; give each image an id of its own")
        listed[identity] = ReadImage(path, size, number=identity if isinstance(identity, int) else None)
    for number, entry in enumerate(_entries(file, content, "annotations")):
        place = f"{file}, annotations[{number}]"
        image, category = _field(place, entry, "image_id"), _field(place, entry, "category_id")
        for key, value, known in (("image_id", image, listed), ("category_id", category, names)):
            if value not in known:
                raise ConfigurationError(f"{place}: {key}={value} is not listed in the file; correct the number")
        numbers = _four(place, _field(place, entry, "bbox"))
        corners = corners_of(numbers, box_format or FORMATS[COCO])
        area = entry.get("area")
        box = ReadBox(place, names[category], corners, bool(entry.get("iscrowd")), area=float(area or 0))
        listed[image].boxes.append(box)
    return {identity: names[identity] for identity in sorted(names, key=_order)}, list(listed.values())


def read_voc(file: Path, image: Path, box_format: BoxFormat | None) -> ReadImage:
    """Read a Pascal VOC xml file. Coordinates are taken as they are.

    Args:
        file: The file.
        image: Path of the image.
        box_format: Format of the four numbers of a box, in the order of the file's elements; None for ``xyxy``.

    Raises:
        ConfigurationError: The file is not Pascal VOC xml, or a number or a name is missing.
    """
    content = _bytes(file)
    if ENTITIES.search(content):  # Entities that refer to each other can grow without bound.
        raise ConfigurationError(f"{file} declares a DOCTYPE or an entity, which Pascal VOC has not: remove it")
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        line, _ = error.position
        raise ConfigurationError(f"{file}, line {line}: not xml ({error}); write the file again") from None
    size = tuple(int(_text_number(file, root, f"size/{name}")) for name in ("height", "width"))
    read = ReadImage(image, (size[0], size[1]))
    for number, entry in enumerate(root.iter("object"), start=1):
        place = f"{file}, object {number}"
        name = (entry.findtext("name") or "").strip()
        if not name:
            raise ConfigurationError(f"{place}: no name; write the name of the class into <name>")
        xmin, ymin, xmax, ymax = (
            _text_number(place, entry, f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")
        )
        corners = corners_of((xmin, ymin, xmax, ymax), box_format or FORMATS[VOC])
        is_difficult = (entry.findtext("difficult") or "0").strip() == "1"
        read.boxes.append(ReadBox(place, name, corners, is_difficult=is_difficult))
    return read


def read_yolo(
    file: Path, image: Path, size: tuple[int, int], names: Sequence[str], box_format: BoxFormat | None
) -> ReadImage:
    """Read a YOLO text file: a line for each box with the class's number and four fractions of width and height.

    Args:
        file: The file; if it does not exist, the image has no boxes.
        image: Path of the image.
        size: Height and width of the image in pixels.
        names: Names of the classes.
        box_format: Format of the boxes; None for ``cxcywh``.

    Raises:
        ConfigurationError: A line does not have five numbers, or a class that has no name.
    """
    read = ReadImage(image, size)
    if not file.exists():
        return read
    height, width = size
    for number, line in enumerate(_text(file).splitlines(), start=1):
        place, values = f"{file}, line {number}", line.split()
        if not values:
            continue
        if len(values) != 5 or not values[0].isdecimal():
            raise ConfigurationError(
                f"{place}: {line.strip()!r} is not a class and four numbers; write 'class x y width height', as "
                "fractions of the image's width and height"
            )
        if int(values[0]) >= len(names):
            raise ConfigurationError(
                f"{place}: class {values[0]}, but there are only {len(names)} names of classes; add the name to "
                "data.yaml or classes.txt, or correct the line"
            )
        fractions = _four(place, values[1:])
        if max(map(abs, fractions)) > 2:
            raise ConfigurationError(
                f"{place}: {line.strip()!r} has numbers above 1; divide them by the image's width ({width}) and height "
                f"({height})"
            )
        x1, y1, x2, y2 = corners_of(fractions, box_format or FORMATS[YOLO])
        corners = (x1 * width, y1 * height, x2 * width, y2 * height)
        read.boxes.append(ReadBox(place, names[int(values[0])], _snapped(corners, size)))
    return read


def yolo_names(root: Path) -> list[str]:
    """Return the names of the classes from ``data.yaml`` or ``classes.txt`` in the data set's folder.

    Raises:
        ConfigurationError: There is no such file, or it has no names.
    """
    for path in (root / "data.yaml", root / "dataset.yaml"):
        if path.is_file():
            try:
                names = (yaml.safe_load(_text(path)) or {}).get("names")
            except (yaml.YAMLError, AttributeError) as error:
                raise ConfigurationError(f"{path} is not yaml ({' '.join(str(error).split())}): correct it") from None
            if isinstance(names, dict) and sorted(names) == list(range(len(names))):
                names = [names[number] for number in range(len(names))]
            if not isinstance(names, list) or not names:
                raise ConfigurationError(f"{path} has no list of names: write names: [first class, second class]")
            return [str(name) for name in names]
    path = root / "classes.txt"
    if path.is_file() and (names := [line.strip() for line in _text(path).splitlines() if line.strip()]):
        return names
    raise ConfigurationError(
        f"{root} has YOLO label files, but no names of classes: write data.yaml with names: [first class, ...], or "
        "classes.txt with a name in each line"
    )


def _snapped(corners: Corners, size: tuple[int, int]) -> Corners:
    """Return corners without an overhang that is only rounding of the file's decimals, a thousandth of the image."""
    height, width = size
    limits = (width, height, width, height)
    x1, y1, x2, y2 = (
        min(max(value, 0.0), float(limit)) if -limit / 1000 <= value <= limit * 1.001 else value
        for value, limit in zip(corners, limits, strict=True)
    )
    return x1, y1, x2, y2


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}): give this user read permission") from None


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8 ({error.reason}): save it with this encoding") from None


def _json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{file}, line {error.lineno}: not json ({error.msg}); write the file again") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is not COCO json: write a mapping with images, annotations and categories")
    return content


def _entries(file: Path, content: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    entries = content.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"{file} has no list {key}: write COCO json with images, annotations and categories")
    return entries


def _field(place: str, entry: Mapping[str, Any], key: str) -> Any:
    if (value := entry.get(key)) is None or isinstance(value, dict) or (key != "bbox" and isinstance(value, list)):
        raise ConfigurationError(f"{place}: {key} is {value!r}; write the {key}")
    return value


def _number(place: str, entry: Mapping[str, Any], key: str) -> float:
    value = _field(place, entry, key)
    if not isinstance(value, int | float) or value < 1:
        raise ConfigurationError(f"{place}: {key}={value!r} is not a number of pixels; write the image's {key}")
    return value


def _four(place: str, values: Any) -> Corners:
    try:
        first, second, third, fourth = (float(value) for value in values)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{place}: the box {values!r} is not four numbers; correct it") from None
    return first, second, third, fourth


def _text_number(place: object, entry: ElementTree.Element, key: str) -> float:
    text = entry.findtext(key)
    try:
        return float(text or "")
    except ValueError:
        raise ConfigurationError(f"{place}: <{key}> is {text!r}; write a number") from None


def _order(identity: Any) -> tuple[bool, Any]:
    return isinstance(identity, str), identity
