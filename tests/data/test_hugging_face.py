"""Data sets of `datasets`: what is found without being named, and what is said where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from extras import needs, optional
from PIL import Image

from runner.base.errors import UserError
from runner.data.sources.hugging_face import EncodedImages, hugging_face

datasets = optional("datasets")
pytestmark = needs("huggingface")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(rows: int = 6, **columns: Any) -> Any:
    """Rows with an image of their number, and other columns."""
    images = [Image.fromarray(np.full((4, 6, 3), index, np.uint8)) for index in range(rows)]
    made = datasets.Dataset.from_dict({"picture": images, **columns})
    return made.cast_column("picture", datasets.Image())


def named(column: str, made: Any) -> Any:
    return made.cast_column(column, datasets.ClassLabel(names=["cat", "dog"]))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def call(made: Any) -> Path:
        made.save_to_disk(str(tmp_path / "saved"))
        return tmp_path / "saved"

    return call


def check(found: EncodedImages, targets: list[int]) -> None:
    assert found.classes == ("cat", "dog")
    assert found.targets.tolist() == targets
    image, target = found[1]
    assert (image.shape, image.unique().tolist(), image.dtype) == ((3, 4, 6), [1], torch.uint8)
    assert target == targets[1]


def test_a_saved_mapping_of_splits_is_read_with_its_only_columns(saved: Any) -> None:
    whole = named("label", make(label=[0, 1, 1, 0, 1, 0]))
    parts = datasets.DatasetDict(train=whole, validation=whole.select(range(3)), extra=whole)
    found = hugging_face(str(saved(parts)))
    assert list(found) == ["train", "val"]
    check(found["train"], [0, 1, 1, 0, 1, 0])
    check(found["val"], [0, 1, 1])
    assert list(hugging_face(str(saved(parts)), test_split="extra")) == ["train", "val", "test"]


def test_one_saved_data_set_and_a_parquet_file_are_the_training_split(saved: Any) -> None:
    whole = named("label", make(label=[0, 1, 1, 0, 1, 0]))
    folder = saved(whole)
    whole.to_parquet(str(folder.parent / "rows.parquet"))
    for root, path in ((folder, None), (folder.parent, "saved"), (folder.parent, "rows.parquet")):
        check(hugging_face(str(root), path=path)["train"], [0, 1, 1, 0, 1, 0])


def test_labels_without_names_are_sorted_and_numbers_may_be_regressed(saved: Any) -> None:
    folder = saved(make(kind=["dog", "cat", "dog", "cat", "cat", "dog"], a=[0, 1, 1, 0, 0, 1], b=[0.5] * 6))
    assert hugging_face(str(folder), label_key="kind")["train"].targets.tolist() == [1, 0, 1, 0, 0, 1]
    pair = hugging_face(str(folder), label_key=["a", "b"])["train"]
    assert pair.targets[:2].tolist() == [[0, 0.5], [1, 0.5]]
    assert pair.classes == ()


@pytest.mark.parametrize(
    ("columns", "options", "key", "reason"),
    [
        ({"a": [0] * 6, "b": [1] * 6}, {}, "data.dataset.label_key", r"2 columns may be it\n.*a, b"),
        ({"a": [0] * 6}, {"label_key": "aa"}, "data.dataset.label_key", "no column 'aa'; did you mean 'a'"),
        ({"a": [0] * 6}, {"image_key": "a"}, "data.dataset.image_key", r"'a' is not an image column\n.*picture"),
        ({"a": [0, 1, 0, None, 1, 1]}, {}, "data.dataset", "column 'a' in line 4 of .* is empty"),
        ({"a": [0] * 6}, {"val_split": "dev"}, "data.dataset.val_split", r"no split 'dev'\n.*train"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_is_missing_or_not_unique_is_named_with_the_choices(
    saved: Any, columns: Any, options: Any, key: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        hugging_face(str(saved(make(**columns))), **options)
    assert caught.value.problems[0].key == key


def test_a_label_that_is_no_class_and_an_image_that_cannot_be_decoded_are_named_with_their_rows(saved: Any) -> None:
    with pytest.raises(UserError, match=r"column 'label' in line 3 of .* is -1, and there are 2 classes"):
        hugging_face(str(saved(named("label", make(label=[0, 1, -1, 0, 1, 0])))))
    rows = datasets.Dataset.from_dict({"picture": [{"bytes": b"damaged", "path": None}] * 2, "label": ["a", "b"]})
    folder = saved(rows.cast_column("picture", datasets.Image()))
    with pytest.raises(UserError, match=r"cannot read the image .*train\[1\]: "):
        hugging_face(str(folder))["train"][1]


def test_without_a_network_or_the_permission_to_fetch_it_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = ConnectionError("Couldn't reach 'some/name' on the Hub")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=refusal))
    with pytest.raises(UserError, match=r"does not exist, and data\.download=false"):
        hugging_face(str(tmp_path), path="some/name")
    with pytest.raises(UserError, match=r"'some/name' from the Hub: Couldn't reach.*\n.*save_to_disk"):
        hugging_face(str(tmp_path), True, path="some/name")


def test_without_the_library_the_command_to_install_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'runner\[huggingface\]'"):
        hugging_face(str(tmp_path))
