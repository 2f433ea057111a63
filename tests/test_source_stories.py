"""Each source of data, model and order: trained, killed, resumed to the same bits, evaluated, applied and exported."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extended import some
from extras import needs
from PIL import Image

# 28 training samples: three batches of 8 and one of 4 an epoch, 8 steps in all.
SMALL = (
    "data.image_size=8", "data.batch_size=8", "epochs=2", "model=mlp", "model.hidden=[8]", "evaluate.test=false",
    "data.normalize.mean=[0.5]", "data.normalize.std=[0.25]", "checkpoint.min_seconds=0",
)  # fmt: skip


@pytest.fixture
def pictures(workdir: Path) -> Path:
    """40 images of noise, and `labels.csv` about them."""
    rng, folder = np.random.default_rng(0), workdir / "pictures"
    folder.mkdir()
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "age", "part", "height", "furry", "loud"])
        for index in range(40):
            label, part = "cat" if index % 5 else "dog", "train" if index < 28 else "val" if index < 34 else "test"
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{index}.png")
            rows.writerow([f"{index}.png", label, index / 10, part, index % 7, index % 2, int(index % 3 == 0)])
    return folder


@pytest.fixture
def story(
    train: Callable[..., Any], run: Callable[..., Any], killed: Callable[..., Path], workdir: Path
) -> Callable[..., Any]:
    """Everything that is done with a run, which must be possible; returns the resumed run."""

    def call(*words: str, step: int = 6, inputs: str = "test", thorough: bool = False) -> Any:
        whole = train(*words)
        directory = killed(step, *words, "checkpoint.every_steps=1")
        rest = train(f"ckpt_path={directory}", "callbacks=none")
        assert f"step {step}" in rest.out or f"step {step - 1}" in rest.out, rest.out
        assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
        assert rest.summary["last"] == whole.summary["last"]
        checkpoint = f"ckpt_path={rest.directory}"
        for verb in (
            ("eval", "split=test"),
            ("predict", f"input={inputs}", f"output={workdir / 'rows.jsonl'}"),
            ("export", f"output={workdir / 'model.pt2'}"),
            ("check", "only=[readable,image-shapes,target-range]"),
        ):
            if verb[0] in ("export", "check") and not thorough:
                continue
            done = run(verb[0], checkpoint, *verb[1:])
            assert done.status == 0, done.err + done.out
        assert (workdir / "rows.jsonl").read_text().strip()
        return rest

    return call


def test_a_table_of_classes(story: Any, pictures: Path, workdir: Path) -> None:
    rest = story("data=csv", f"data.root={pictures}", "data.dataset.split_column=part", *SMALL, inputs=str(pictures))
    rows = [json.loads(line) for line in (workdir / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert rest.directory.is_dir()


@pytest.mark.extended
def test_a_table_of_numbers_read_by_workers(story: Any, pictures: Path) -> None:
    story(
        "data=csv", f"data.root={pictures}", "data.dataset.label_columns=age", "data.dataset.kind=regression", *SMALL,
        "task=regression", "loss=mse", "data.num_workers=2", "data.cache=disk",
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    "words", some([("accumulate=2",), ("data.num_workers=2", "data.hflip=0.5", "transform=strong")], 0)
)
def test_balanced_classes(story: Any, pictures: Path, words: tuple[str, ...]) -> None:
    step = 3 if "accumulate=2" in words else 6
    rest = story("data=csv", f"data.root={pictures}", "data.sampler=balanced", *SMALL, *words, step=step)
    row = next(line for line in rest.out.splitlines() if line.strip().startswith("sampler"))
    assert row.split()[1] == "balanced"


ROWS = {
    "multilabel": ("[furry,loud]", "task=multilabel", "loss=bce"),
    "regression": ("[age,height]", "task=regression", "loss=mse"),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", some(ROWS, 0))
def test_a_table_with_several_columns_of_targets(kind: str, story: Any, pictures: Path) -> None:
    columns, *words = ROWS[kind]
    story(
        "data=csv", f"data.root={pictures}", f"data.dataset.label_columns={columns}", f"data.dataset.kind={kind}",
        "data.dataset.split_column=part", *SMALL, *words, thorough=True,
    )  # fmt: skip


@pytest.mark.extended
@needs("huggingface")
@pytest.mark.parametrize("kind", some(["classification", *ROWS], 0))
def test_a_data_set_of_hugging_face(kind: str, story: Any, pictures: Path) -> None:
    import datasets

    with (pictures / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, list[Any]] = {"image": [str(pictures / row["image"]) for row in rows]}
    columns |= {"label": [row["label"] for row in rows]}
    columns |= {name: [float(row[name]) for row in rows] for name in ("age", "height")}
    columns |= {name: [int(row[name]) for row in rows] for name in ("furry", "loud")}
    saved = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    saved.save_to_disk(str(pictures / "saved"))
    words = ["data.dataset.label_key=label", "data.num_workers=2"]
    if kind in ROWS:
        names, *words = ROWS[kind]
        words += [f"data.dataset.label_key={names}", f"data.dataset.kind={kind}"]
    story("data=huggingface", f"data.root={pictures}", "data.dataset.path=saved", *SMALL, *words)


@pytest.mark.extended
@needs("timm")
def test_a_model_of_timm_on_folders_of_images(story: Any, pictures: Path, workdir: Path) -> None:
    for index in range(40):
        path = workdir / "folders" / ("cat" if index % 2 else "dog") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        (pictures / f"{index}.png").rename(path)
    words = [word for word in SMALL if not word.startswith(("model", "data.image_size"))]
    rest = story(
        "data=image_folder", f"data.root={workdir / 'folders'}", *words, "model=timm", "model.name=test_resnet",
        "model.options={drop_rate: 0.2}", "data.image_size=32", "data.num_workers=0",
    )  # fmt: skip
    assert rest.summary["status"] == "finished"
