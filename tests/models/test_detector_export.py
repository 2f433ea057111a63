"""Exported detectors: the outputs of the model in each format, and boxes from the script of the documentation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_objects
import numpy as np
import pytest
import torch
from docs_pages import DOCS
from extended import some
from extras import needs
from PIL import Image
from tiny_detectors import FAMILIES

from runner.models.transformers_detection import detector

pytestmark = [needs("detection"), needs("transformers")]
WORDS = (
    *drawn_objects.COCO, "experiment=detection_torchvision", "data.root=drawn", "data.batch_size=2", "data.num_workers=0",
    "threads=1", "epochs=1", "max_steps=1", "evaluate.test=false", "evaluate.batch_size=3",
)  # fmt: skip
DETECTOR = ("model=transformers_detection", "model.name=weights", "model.weights=weights", "lr=1e-5")


def _size(name: str) -> int:
    # The smallest map of Deformable DETR would otherwise be one pixel, without a variance
    return 128 if name == "deformable_detr" else 64


@pytest.fixture
def drawn(workdir: Path) -> Path:
    drawn_objects.draw(workdir / "drawn", "train", 6, 0)
    drawn_objects.draw(workdir / "drawn", "val", 5, 1)
    return workdir / "drawn"


@pytest.fixture
def trained(train: Callable[..., Any], drawn: Path) -> Callable[..., Path]:
    """The directory of a run of one step of a detector whose scores differ: those of new models are equal."""

    def of(name: str = "rt_detr_v2") -> Path:
        torch.manual_seed(0)
        model = detector(name, 3, options=dict(FAMILIES)[name])
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.add_(0.1 * torch.randn_like(weight))
        model.net.save_pretrained("weights")  # type: ignore[union-attr,operator]
        return train(*WORDS, *DETECTOR, f"model.size={_size(name)}").directory  # type: ignore[no-any-return]

    return of


def export(json_of: Any, directory: Path, *words: str) -> dict[str, Any]:
    return json_of("export", "threads=1", f"ckpt_path={directory}", "batch_sizes=[1,3]", *words)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", some(["detr", "rt_detr_v2", "rt_detr", "deformable_detr"], 0))
def test_a_program_of_torch_has_the_outputs_of_the_model(name: str, trained: Any, json_of: Any, rejected: Any) -> None:
    directory = trained(name)
    record = export(json_of, directory)
    assert [(row["batch_size"], row["max_rel"] <= 1e-5) for row in record["comparison"]] == [(1, True), (3, True)]
    assert [(each["name"], each["shape"]) for each in record["output"]] == [
        ("logits", ["batch", 20, 2 + (name == "detr")]), ("boxes", ["batch", 20, 4]),
    ]  # fmt: skip
    assert record["activation"] == ("softmax" if name == "detr" else "sigmoid")
    assert record["classes"] == drawn_objects.NAMES
    assert record["preprocessing"]["image_size"] == [_size(name)] * 2
    call = ("export", "threads=1", f"ckpt_path={directory}")
    assert "split: needs a model" in rejected(*call, "split=val").err
    assert "split: needs a model" in rejected(*call, "format=onnx", "quantize=int8").err
    assert "model.size: is null" in rejected(*call, "model.size=null").err


@needs("export")
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rt_detr_v2", ()),
        ("rt_detr_v2", ("include_preprocessing=true",)),
        ("detr", ()),
        ("d_fine", ()),
        ("conditional_detr", ()),
    ],
)
def test_the_script_of_the_documentation_finds_what_predict_finds(
    name: str, words: tuple[str, ...], trained: Any, json_of: Any, accepted: Any, workdir: Path
) -> None:
    directory = trained(name)
    record = export(json_of, directory, "format=onnx,torch_export", "output=out", "tolerance=1e-4", *words)
    assert len(record["comparison"]) == 4
    random = np.random.default_rng(0)
    pictures = workdir / "pictures"
    pictures.mkdir()
    for number in range(20):
        coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), dtype=np.uint8))
        coarse.resize((int(random.integers(30, 200)), int(random.integers(30, 200)))).save(
            pictures / f"{number:02}.png"
        )
    accepted("predict", "threads=1", f"ckpt_path={directory}", "input=pictures", "output=found.jsonl")

    (script,) = re.findall(
        r"`boxes.py`:\n\n```python\n(.*?)^```$", (DOCS / "howto/detection.md").read_text(), re.M | re.S
    )
    assert script.count("\n") <= 40
    Path("boxes.py").write_text(script)
    description = json.loads(Path("out/model.json").read_text())
    Path("out/model.json").write_text(json.dumps({**description, "threshold": -0.5}))  # as predict lists all
    call = [sys.executable, "boxes.py", "out", *sorted(str(each) for each in pictures.iterdir())]
    output = subprocess.run(call, capture_output=True, text=True, check=True, env={"PATH": ""}).stdout
    said = [json.loads(line) for line in output.splitlines()]
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    score, pixels = (1e-2, 1.0) if words else (1e-4, 0.02)  # bytes are rounded
    for row in rows:
        mine = [each for each in said if Path(each["picture"]).name == Path(row["path"]).name]
        assert len(mine) == len(row["scores"])
        own = np.array([[each["score"], *each["box"], drawn_objects.NAMES.index(each["name"]) + 1] for each in mine])
        theirs = np.column_stack([row["scores"], row["boxes"], row["labels"]])
        scaled = [np.array(each) / [score, *[pixels] * 4, 0.1] for each in (theirs, own)]
        apart = np.abs(scaled[0][:, None] - scaled[1][None]).max(-1)
        assert apart.min(1).max() < 1, row["path"]
        assert apart.min(0).max() < 1, row["path"]


def test_detectors_of_torchvision_cannot_be_exported(train: Any, rejected: Any, drawn: Path) -> None:
    directory = train(*WORDS, "model.name=ssdlite320_mobilenet_v3_large").directory
    result = rejected("export", "threads=1", f"ckpt_path={directory}")
    assert "task: cannot tell the inputs of SSD" in result.err
    assert "model=rtdetr_r18 or model=transformers_detection" in result.err


def test_queries_are_compared_one_to_one() -> None:
    raw = detector("rt_detr_v2", 3, size=64, options=dict(FAMILIES)["rt_detr_v2"]).export_model()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    expected = {name: torch.rand(2, 20, width, generator=generator) for name, width in (("logits", 2), ("boxes", 4))}
    noise = {name: each + 1e-6 * torch.rand(each.shape, generator=generator) for name, each in expected.items()}

    def apart(got: dict[str, torch.Tensor]) -> float:
        found = raw.match_queries(expected, got)
        return max(float((found[name] - each).abs().max()) for name, each in expected.items())

    assert apart({name: each.flip(1) for name, each in noise.items()}) < 1e-5
    # The last query is missing, and the first one is there twice; then the logits of two queries have changed places
    assert apart({name: torch.cat([each[:, :-1], each[:, :1]], 1) for name, each in expected.items()}) > 0.1
    assert apart({**expected, "logits": expected["logits"].roll(1, 1)}) > 0.1
    assert np.isnan(apart({**expected, "logits": expected["logits"].clone().index_fill_(1, torch.tensor(3), np.nan)}))
