"""Images and their classes, labels or values from a CSV file."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import PredictionWriter
from cnnstrategies.data import ImageTableDataModule
from tests.conftest import quiet_trainer

CLASSES = "image,species\na.png,cat\nb.png,dog\nc.png,cat\nd.png,dog\n"
LABELS = "file,Split,wet,cold\na.png,train,0,1\nb.png,TRAIN,1,1\nc.png,valid,0,0\nd.png,testing,1,0\n"


def table(text, **options):
    Path("labels.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    for number, name in enumerate("abcd"):
        Image.new("RGB", (9, 8), (40 * number,) * 3).save(f"{name}.png")
    data = ImageTableDataModule(Path("."), image_size=8, batch_size=4, num_workers=0, **options)
    data.setup("fit")
    return data


@pytest.mark.light
def test_a_column_of_names_has_the_classes():
    data = table(CLASSES, val_split=0.5)
    assert data.class_names == ["cat", "dog"]
    classes = {
        source.name(i): int(source.targets[i]) for source in (data.train_source, data.val_source) for i in (0, 1)
    }
    assert classes == {"a.png": 0, "b.png": 1, "c.png": 0, "d.png": 1}
    assert data.describe("val").startswith("2 held out of labels.csv, ")


@pytest.mark.light
def test_columns_of_numbers_are_labels_or_values():
    data = table(LABELS, task="multilabel")
    assert (data.class_names, data.num_classes) == (["wet", "cold"], 2)
    assert data.describe("train") == "2 in labels.csv"
    ((images, targets),) = data.train_dataloader()
    assert images.shape == (2, 3, 8, 8)
    assert sorted(targets.tolist()) == [[0.0, 1.0], [1.0, 1.0]]
    assert [source.targets.tolist() for source in (data.val_source, data.test_source)] == [[[0.0, 0.0]], [[1.0, 0.0]]]
    data = table(LABELS.replace("0,0", "-2.5,7"), task="regression", columns=["wet"])
    assert data.val_source.targets.tolist() == [[-2.5]]
    with pytest.raises(ConfigurationError, match="task=classes, but ImageTableDataModule has task=regression: set"):
        ImageClassifier(torch.nn.Flatten(), 2).check_data(table(LABELS, task="regression"))


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_tables_of_labels_or_values_can_be_evaluated_and_predicted(task):
    data = table(LABELS, task=task)
    torch.manual_seed(0)
    model = ImageClassifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)), 2, task=task)
    trainer = quiet_trainer(callbacks=[PredictionWriter(Path("found.csv"))])
    (metrics,) = trainer.validate(model, data, verbose=False)
    assert f"val_{model.quality}" in metrics
    trainer.predict(model, data, return_predictions=False)
    (row,) = csv.DictReader(Path("found.csv").read_text().splitlines())
    with torch.no_grad():
        outputs = model.network(data.eval_transform(data.predict_source.fetch([0])[0]))[0]
    names, values = (["wet", "cold"], outputs) if task == "regression" else (["p(wet)", "p(cold)"], outputs.sigmoid())
    assert [float(row[name]) for name in names] == pytest.approx(values.tolist(), abs=1e-5)
    assert row["sample"] == "d.png"
    assert ("class" in row) == (task == "multilabel")


@pytest.mark.light
def test_spaces_separators_and_encodings_do_not_change_the_classes():
    plain = table(CLASSES, val_split=0.5)
    for text in (
        CLASSES.replace("a.png,cat", "a.png , cat ").replace("b.png,dog", "b.png,dog "),
        CLASSES.replace("\n", ",\n"),
        CLASSES.replace("\n", "\r\n").replace("cat\r\nb", "cat,\r\n\r\nb"),
        CLASSES.replace(",", ";"),
        CLASSES.replace(",", "\t"),
    ):
        data = table(text, val_split=0.5)
        assert data.class_names == ["cat", "dog"], text
        assert data.parts() == plain.parts(), text
    for encoding in ("utf-8-sig", "utf-16"):
        data = table(CLASSES.replace("cat", "läufer").encode(encoding), val_split=0.5)
        assert data.class_names == ["dog", "läufer"]
    # The same name with a composed and with a separate accent is one class.
    accents = CLASSES.replace("a.png,cat", "a.png,\u00e9").replace("c.png,cat", "c.png,e\u0301")
    assert table(accents, val_split=0.5).class_names == ["dog", "\u00e9"]


@pytest.mark.light
def test_spaces_in_the_name_of_a_file_are_kept():
    for name in (" e.png", "f.png"):
        Image.new("RGB", (9, 8)).save(name)
    data = table(CLASSES + " e.png,cat\n f.png,dog\n", val_split=0.5)
    assert {"f.png", " e.png"} <= {*data.table["train"][0]}


MISTAKES = {
    "no file": ("", {"labels": Path("other.csv")}, r"other.csv cannot be read \(No such file"),
    "empty": ("\n", {}, "labels.csv is empty: write a line with the names"),
    "no rows": ("image,species\n", {}, "has no training images"),
    "one column": ("image\na.png\n", {}, "has the target columns none, but task=classes needs one"),
    "no column": (CLASSES, {"columns": ["age"]}, "has no column 'age', but only image, species"),
    "two columns": (LABELS, {}, "columns wet, cold, but task=classes needs one: set data"),
    "other split": (
        LABELS.replace("testing", "trial"),
        {"task": "multilabel"},
        "line 5: 'trial' in the column split; use train, val",
    ),
    "no training": ("image,split,a\na.png,val,1\n", {"task": "regression"}, "has no training images"),
    "other class": (
        "image,split,a\na.png,train,x\nb.png,train,y\nc.png,val,z\n",
        {},
        "line 4: c.png has the class 'z', but no",
    ),
    "no class": (CLASSES.replace("b.png,dog", "b.png,"), {}, r"line 3: b.png has no class \(''\); write its class"),
    "missing class": (CLASSES.replace("b.png,dog", "b.png,NaN"), {}, r"line 3: b.png has no class \('NaN'\)"),
    "no label": (
        LABELS.replace("1,1", "1,2"),
        {"task": "multilabel"},
        "line 3: b.png has the targets 1; 2; write 0 or 1 for each label",
    ),
    "no number": (
        LABELS.replace("1,1", "1,"),
        {"task": "regression"},
        "line 3: b.png has the targets 1; ; write a number",
    ),
    "infinity": (
        LABELS.replace("1,1", "1,-inf"),
        {"task": "regression"},
        "line 3: b.png has the targets 1; -inf; write a number",
    ),
    "decimal comma": (
        LABELS.replace("1,1", "1,0,5"),
        {"task": "regression"},
        r"line 3: 5 values \(b.png, TRAIN, 1, 0, 5\), but 4 columns .* needs quotes, and a number a decimal point",
    ),
    "decimal comma and semicolon": (
        LABELS.replace(",", ";").replace("1;1", "1;0,5"),
        {"task": "regression"},
        "line 3: b.png has the targets 1; 0,5; write a number such as 1.5",
    ),
    "short row": (
        CLASSES.replace("b.png,dog", "b.png"),
        {},
        r"line 3: 1 value \(b.png\), but 2 columns .* write a value",
    ),
    "no header": (CLASSES.partition("\n")[2], {}, "line 1: a.png, cat is an image and not the names of the columns"),
    "two names": (
        CLASSES.replace("image,species", "image,a,b,a"),
        {},
        "line 1: 2 columns have the name 'a'; give them",
    ),
    "no name": (CLASSES.replace("image,species", "image,,species"), {}, "line 1: a column has no name; write"),
    "latin-1": (
        CLASSES.replace("b.png,dog", "b.png,läufer").encode("latin-1"),
        {},
        r"line 3: the text is not UTF-8 \(.*, 0xe4\); save the file with the encoding UTF-8",
    ),
    "truncated": (CLASSES.encode("utf-16")[:-1], {}, "the text is not UTF-16"),
    "long value": (CLASSES + '"' + "x" * 200_000, {}, "line 6: field larger than field limit .*; correct the line"),
    "no later image": (CLASSES.replace("b.png", "e.png"), {}, "labels.csv, line 3: e.png does not exist: correct the"),
    "two classes": (
        CLASSES + "./a.png,dog\n",
        {},
        r"line 6: ./a.png has species=dog, but line 2 has species=cat for the same image: remove one of the lines",
    ),
    "two splits": (
        LABELS + LABELS.splitlines()[1].replace("train", "val") + "\n",
        {"task": "regression"},
        "has Split=val, but line 2 has Split=train for the same image",
    ),
    "no image": (
        LABELS.replace("a.png", "e.png"),
        {"task": "regression"},
        "lists e.png, which does not exist: make the paths",
    ),
}


@pytest.mark.light
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_named_with_its_line(mistake):
    text, options, message = MISTAKES[mistake]
    with pytest.raises(ConfigurationError, match=message) as caught:
        table(text, **options)
    assert "\n" not in str(caught.value)
