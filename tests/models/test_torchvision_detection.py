"""Models of torchvision that find objects: built for the classes of the data, with and without trained weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

from runner.base.errors import UserError
from runner.models.torchvision_detection import detector

SMALL = {"min_size": 64, "max_size": 64}
MODELS = [
    ("fasterrcnn_mobilenet_v3_large_320_fpn", SMALL),
    ("ssdlite320_mobilenet_v3_large", {}),
    ("fasterrcnn_resnet50_fpn", SMALL),
    ("maskrcnn_resnet50_fpn", SMALL),
    ("maskrcnn_resnet50_fpn_v2", SMALL),
    ("retinanet_resnet50_fpn", SMALL),
    ("fcos_resnet50_fpn", SMALL),
    ("ssd300_vgg16", {}),
]


def targets() -> list[dict[str, Any]]:
    boxes = torch.tensor([[4.0, 6, 40, 50]])
    masks = torch.zeros(1, 64, 64, dtype=torch.uint8)
    masks[0, 6:50, 4:40] = 1
    found = {"boxes": boxes, "labels": torch.tensor([3]), "masks": masks}
    return [found, {"boxes": boxes[:0], "labels": torch.empty(0, dtype=torch.int64), "masks": masks[:0]}]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("name", "options"), some(MODELS, 0, several=True))
def test_a_model_gives_losses_and_objects(name: str, options: dict[str, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = detector(name, 4, options=options).to(dtype)
    images = [torch.rand(3, 64, 64, dtype=dtype) for _ in range(2)]
    some_targets = [{**each, "boxes": each["boxes"].to(dtype)} for each in targets()]
    losses = model(images, some_targets)
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    found = model.eval()(images)
    assert [set(each) >= {"boxes", "labels", "scores"} for each in found] == [True, True]
    assert all(int(each["labels"].max()) < 4 for each in found if len(each["labels"]))
    assert ("masks" in found[0]) == name.startswith("maskrcnn")
    model.score_thresh = 0.0  # an untrained one is sure of nothing
    with torch.autocast("cpu", torch.bfloat16):
        boxes = model(images)[0]["boxes"]
    assert len(boxes)
    assert boxes.dtype == dtype
    assert not boxes.equal(boxes.bfloat16().to(dtype))


@pytest.mark.parametrize(
    ("name", "file"),
    some([
        ("ssdlite320_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large_coco-a79551df.pth"),
        ("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_coco-eeacb38b.pth"),
        ("maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth"),
    ], 0, several=True),
)  # fmt: skip
def test_weights_of_coco_are_used_where_they_fit(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import models

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    empty = detector(name, 4, weights="DEFAULT", fetch_weights=False)
    whole = models.get_model(name, weights=None, weights_backbone=None)
    torch.save(whole.state_dict(), tmp_path / "checkpoints" / file)
    model, plain = detector(name, 4, weights="COCO_V1"), detector(name, 4)
    known, own = whole.state_dict(), model.state_dict()
    differing = [key for key, value in plain.state_dict().items() if value.shape != known[key].shape]
    assert differing
    assert all(value.equal(known[key]) for key, value in own.items() if key not in differing)
    assert all(own[key].shape == plain.state_dict()[key].shape for key in differing)
    # A checkpoint is loaded into the same structure, with the same frozen layers
    assert {key: value.shape for key, value in empty.state_dict().items()} == {
        key: value.shape for key, value in own.items()
    }
    trained = [[weight.requires_grad for weight in each.parameters()] for each in (empty, model)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        ({"name": "fasterrcnn_resnet50"}, "model.name", "fasterrcnn_resnet50_fpn"),
        ({"name": "keypointrcnn_resnet50_fpn"}, "model.name", "no torchvision detection model"),
        ({"weights": "IMAGENET1K_V1"}, "model.weights", "no weights 'IMAGENET1K_V1'"),
        ({"weights_backbone": "BEST"}, "model.weights_backbone", "resnet50 has no weights 'BEST'"),
        ({"weights": "DEFAULT"}, "model.weights", r"/(fcos_resnet50_fpn_coco.*) to /.*/checkpoints/\1 yourself"),
        ({"weights_backbone": "DEFAULT"}, "model.weights_backbone", r"/(resnet50-.*) to /.*/checkpoints/\1 yourself"),
    ],
)
def test_what_there_is_not_is_a_sentence(arguments: dict[str, Any], key: str, reason: str, offline: Path) -> None:
    with pytest.raises(UserError) as caught:
        detector(num_classes=4, **{"name": "fcos_resnet50_fpn"} | arguments)
    assert caught.value.problems[0].key == key
    assert re.search(reason, str(caught.value))
