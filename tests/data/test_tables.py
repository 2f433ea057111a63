"""Tables of image files and labels: what becomes of each kind of column, and which line is to blame."""

from __future__ import annotations

import csv
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from plain_data import plain_image

from runner.base.errors import UserError
from runner.data.sources.folders import ImageFolder
from runner.data.sources.tables import image_table

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a table of six images, one per row of `columns`, as CSV or Parquet."""
    for index in range(6):
        plain_image(tmp_path / "pics" / f"{index}.png", (index, 0, 0))

    def call(name: str = "labels.csv", **columns: Sequence[Any]) -> Path:
        table = {"image": [f"pics/{index}.png" for index in range(6)], **columns}
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / name)
            return tmp_path
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
        return tmp_path

    return call


def read(root: Path, table: str = "labels.csv", **options: Any) -> ImageFolder:
    return image_table(str(root), table, **options)["train"]


ANIMALS = ["dog", "cat", "dog", "cat", "cat", " dog "]


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.parquet"])
def test_a_column_of_names_becomes_class_numbers_in_the_order_of_the_names(write: Write, name: str) -> None:
    found = read(write(name, label=ANIMALS), name)
    assert found.classes == ("cat", "dog")
    assert found.targets.tolist() == [1, 0, 1, 0, 0, 1]
    image, target = found[4]
    assert (image.shape, int(image[0, 0, 0])) == ((3, 4, 6), 4)
    assert target == 0
    assert isinstance(target, int)


@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet"])
def test_whole_numbers_are_classes_in_the_order_of_the_numbers(write: Write, name: str) -> None:
    found = read(write(name, label=[10, 9, 2, 9, 10, 2]), name)
    assert found.classes == ("2", "9", "10")
    assert found.targets.tolist() == [2, 1, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("columns", "options", "targets", "classes"),
    [
        ({"a": [0, 1, 1, 0, 0, 1], "b": [1, 1, 0, 0, 0, 0]}, {}, [[0, 1], [1, 1], [1, 0]], ("a", "b")),
        ({"a": [0, 1, 1, 0, 0, 1], "b": [1, 1, 0, 0, 0, 0]}, {"kind": "regression"}, [[0, 1], [1, 1], [1, 0]], ()),
        ({"a": [0.5, 1, 1, 0, 0, 1], "b": [-3, 1, 0, 0, 0, 0]}, {}, [[0.5, -3], [1, 1], [1, 0]], ()),
        ({"a": [0.5, 1, 2, 0, 0, 1]}, {"kind": "regression"}, [0.5, 1, 2], ()),
        ({"a": [0, 1, 1, 0, 0, 1]}, {"kind": "multilabel"}, [[0], [1], [1]], ("a",)),
    ],
    ids=["multilabel", "numbers as asked", "numbers", "one number", "one label"],
)
def test_columns_of_numbers_become_float_targets(
    write: Write, columns: Any, options: Any, targets: Any, classes: tuple[str, ...]
) -> None:
    found = read(write(**columns), label_columns=list(columns), **options)
    assert found.targets.dtype == torch.float32
    assert found.targets[:3].tolist() == targets
    assert found.classes == classes
    assert torch.equal(torch.as_tensor(found[1][1]), found.targets[1])


def test_a_column_gives_the_splits_and_another_the_groups(write: Write) -> None:
    root = write(label=ANIMALS, part=["train", "Valid", "test", "train", "dev", "train"], who=list("aabbcc"))
    found = image_table(str(root), "labels.csv", split_column="part", group_column="who")
    targets = {name: split.targets.tolist() for name, split in found.items()}
    assert targets == {"train": [1, 0, 1], "val": [0, 0], "test": [1]}
    assert found["val"].classes == ("cat", "dog"), "the same in every split"
    assert found["train"].groups == ["a", "b", "c"]
    assert int(found["test"][0][0][0, 0, 0]) == 2
    root = write("other.csv", label=ANIMALS, is_valid=["False", "True", "False", "False", "True", "False"])
    found = image_table(str(root), "other.csv", split_column="is_valid")
    assert {name: len(split) for name, split in found.items()} == {"train": 4, "val": 2}


def test_paths_start_at_the_folder_of_the_table_or_at_the_root(write: Write, tmp_path: Path) -> None:
    root = write(label=ANIMALS)
    (root / "tables").mkdir()
    (root / "labels.csv").rename(root / "tables" / "labels.csv")
    from_root = read(root, "tables/labels.csv")
    (root / "pics").rename(root / "tables" / "pics")
    from_table = read(root, "tables/labels.csv")
    assert from_root.paths[0] == root / "pics" / "0.png"
    assert from_table.paths[0] == root / "tables" / "pics" / "0.png"
    assert read(root, str(root / "tables" / "labels.csv")).paths == from_table.paths


def test_lines_are_counted_as_an_editor_does(write: Write) -> None:
    text = 'image,"a ""label""\nof two lines"\n\npics/0.png,"b\nc"\npics/1.png,\n'
    (write() / "labels.csv").write_text("\ufeff" + text, encoding="utf-8")
    with pytest.raises(UserError, match=r"in line 6 of .* is empty"):
        read(write(name="other.csv"), label_columns='a "label"\nof two lines')


@pytest.mark.parametrize(
    ("columns", "options", "key", "reason"),
    [
        ({"lable": ANIMALS}, {}, "data.dataset.label_columns", r"no column 'label'; did you mean 'lable'.*\n.*image, lable"),
        ({"label": ANIMALS}, {"split_column": "fold"}, "data.dataset.split_column", r"no column 'fold'\n.*image, label"),
        ({"label": ANIMALS}, {"image_column": "path"}, "data.dataset.image_column", "no column 'path'"),
        ({"label": ANIMALS}, {"label_columns": []}, "data.dataset.label_columns", "one or more columns"),
        ({"label": ["a", "b", "", "a", "b", "a"]}, {}, "data.dataset", "column 'label' in line 4 of .* is empty"),
        ({"label": ["a", "b", "a", "NaN", "b", "a"]}, {}, "data.dataset", "column 'label' in line 5 of .* is NaN"),
        ({"label": [1, 2, 0.5, 1, 2, 1]}, {}, "data.dataset", r"in line 4 of .* is 0\.5, which is not a class\n.*regression"),
        ({"label": ["a", "b", "\u00e9t\u00e9", "e\u0301te\u0301", "b", "a"]}, {}, "data.dataset",
         r"line 5 of .* is 'e\\u0301te\\u0301', and in line 4 '\\xe9t\\xe9', which look like one class"),
        ({"label": [1, 2, 1, "1.0", 2, 1]}, {}, "data.dataset", r"line 5 of .* is '1\.0', and in line 2 '1', which look"),
        ({"label": [1, 2, "x", 1, 2, 1]}, {"kind": "regression"}, "data.dataset", "line 4 of .* is 'x', which is not a finite"),
        ({"label": [1, 2, "1_0", 1, 2, 1]}, {"kind": "regression"}, "data.dataset", "line 4 of .* is '1_0'"),
        ({"label": [1, 2, "inf", 1, 2, 1]}, {"kind": "regression"}, "data.dataset", "line 4 of .* is 'inf'"),
        ({"label": [1, 0, 1, 2, 1, 0]}, {"kind": "multilabel"}, "data.dataset", r"line 5 of .* is 2\n.*0 or 1 in every"),
        ({"label": ANIMALS, "b": ANIMALS}, {"label_columns": ["label", "b"], "kind": "classification"}, "data.dataset.kind",
         "one column of classes"),
        ({"label": ANIMALS}, {"split_column": "label"}, "data.dataset", "in line 2 of .* is 'dog', which is not a split"),
        ({"label": ANIMALS, "image": ["pics/0.png", *["gone.png"] * 5]}, {}, "data.dataset",
         r"in line 3 of .* names a file that does not exist: .*gone\.png \(and 4 more\)\n.*data.on_error=skip"),
        ({"label": ANIMALS, "image": ["x" * 5000, *["pics/0.png"] * 5]}, {}, "data.dataset",
         r"line 2 of .* names a file that does not exist: .{100}\.\.\. \(\d,\d{3} letters\)"),
        ({"label": ANIMALS, "image": ["", *["gone.png"] * 5]}, {}, "data.dataset", "column 'image' in line 2 of .* is empty"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(write: Write, columns: Any, options: Any, key: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        read(write(**columns), **options)
    assert caught.value.problems[0].key == key


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("gone.csv", None, r"gone\.csv does not exist"),
        ("labels.xlsx", b"", "its suffix is unknown"),
        ("labels.csv", b"", "is empty"),
        ("labels.csv", b"image;label\n", "has ';' between its columns\n.*delimiter="),
        ("labels.csv", b"image\tlabel\n", r"has '\\t' between its columns\n.*delimiter="),
        ("labels.csv", b"image,label\n", "has no rows"),
        ("labels.csv", b"image,label\npics/0.png\n", "line 2 of .* has 1 entries, and there are 2 columns"),
        ("labels.csv", b"image,label,label\npics/0.png,a,b\n", "twice the column 'label'"),
        ("labels.csv", b"image,label\npics/0.png,\xff\n", "it is not UTF-8 text"),
        ("labels.csv", b'image,label\npics/0.png,"a"b\n', "cannot read .*labels.csv: ',' expected"),
        ("labels.parquet", b"PAR1 no", "cannot read "),
    ],
    ids=lambda value: "",
)
def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read(tmp_path, name)


@pytest.mark.parametrize("typed", ["\t", "\\t"])
def test_a_csv_file_with_tabs_is_read_with_its_delimiter(write: Write, typed: str) -> None:
    root = write("labels.tsv", label=ANIMALS)
    (root / "labels.tsv").rename(root / "labels.csv")
    assert read(root, delimiter=typed).classes == ("cat", "dog")


def test_a_parquet_file_stands_for_no_more_than_it_can_hold(write: Write, tmp_path: Path) -> None:
    write("labels.parquet", label=ANIMALS)
    count = 30_000_000
    same = pyarrow.DictionaryArray.from_arrays(np.zeros(count, dtype=np.int32), ["pics/0.png"])
    pyarrow.parquet.write_table(pyarrow.table({"image": same, "label": same}), tmp_path / "many.parquet")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"many\.parquet: 30,000,000 rows in .* bytes, and at most"):
        read(tmp_path, "many.parquet")
    assert time.monotonic() < began + 5
    long = pyarrow.table({"image": [f"pics/{n % 6}.png" for n in range(300)], "label": ["x" * 300_000] * 300})
    pyarrow.parquet.write_table(long, tmp_path / "long.parquet", compression="zstd")
    tracemalloc.start()
    assert len(read(tmp_path, "long.parquet")) == 300
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()


def test_a_null_of_parquet_is_empty_and_missing_files_are_left_to_be_skipped_if_they_may_be(write: Write) -> None:
    root = write("labels.parquet", label=["a", "b", None, "a", "b", "a"])
    with pytest.raises(UserError, match=r"column 'label' in line 3 of .* is empty"):
        read(root, "labels.parquet")
    write(label=ANIMALS)
    (root / "pics" / "2.png").unlink()
    assert len(read(root, on_error="skip")) == 6
