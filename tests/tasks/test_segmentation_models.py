"""Segmentation: models, losses, predictions of image files, and exported models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_masks import MODEL, TINY, draw
from extras import needs
from PIL import Image


@pytest.fixture(autouse=True)
def shapes(workdir: Path, own_module: Callable[..., Path]) -> Path:
    own_module("drawn_nets", MODEL)
    return draw(workdir / "shapes", void=True)


@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_models_of_torchvision_give_logits_of_each_pixel_from_any_channels(name: str) -> None:
    from runner.models.torchvision_zoo import segmenter

    with_aux = not name.startswith("lraspp")
    model = segmenter(name, 3, in_channels=1, aux_loss=with_aux).eval()
    with torch.no_grad():
        outputs = model(torch.rand(2, 1, 64, 48))
    assert {key: tuple(each.shape) for key, each in outputs.items()} == dict.fromkeys(
        ["out"] + ["aux"] * with_aux, (2, 3, 64, 48)
    )


def test_models_of_torchvision_train_with_an_auxiliary_loss(train: Callable[..., Any]) -> None:
    words = ("experiment=segmentation", "data.root=shapes", "data.image_size=32", "epochs=1", "max_steps=1", "data.batch_size=4",
             "data.num_workers=0", "model.name=deeplabv3_mobilenet_v3_large", "model.aux_loss=true")  # fmt: skip
    assert "miou" in train(*words).summary["last"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("model.name=fcn_resnet5",), "model.name"),
        (("model.weights_backbone=IMAGENET",), "model.weights_backbone"),
        (("model.aux_loss=true",), "model.aux_loss"),
    ],
)
def test_models_that_do_not_exist_are_a_sentence(
    refused: Callable[..., None], words: tuple[str, ...], key: str
) -> None:
    refused(("experiment=segmentation", "data.root=shapes", "data.num_workers=0", *words), key)


@pytest.mark.extra(name="smp")
def test_models_of_smp_train(train: Callable[..., Any], rejected: Callable[..., Any]) -> None:
    words = ("experiment=segmentation", "model=smp", "model.encoder=resnet18", "data.root=shapes", "data.num_workers=0",
             "data.batch_size=4", "data.image_size=32", "epochs=1", "max_steps=1")  # fmt: skip
    assert "miou" in train(*words).summary["last"]
    assert "resnet1`" in rejected("train", *words, "model.encoder=resnet1").err
    from runner.models.smp_zoo import segmenter

    # Neither a name that is known in lower case, nor weights that are not asked for, end it
    assert segmenter("Unet", 2, encoder="resnet18", encoder_weights="imagenet", fetch_weights=False)


@pytest.mark.extended
def test_another_loss_and_another_metric(train: Callable[..., Any]) -> None:
    metric = "metrics.jaccard={_target_: torchmetrics.classification.MulticlassJaccardIndex, num_classes: 3, ignore_index: 255}"
    for words in (("loss=focal",), ("loss=cross_entropy", "loss.label_smoothing=0.1", "loss.class_weights=[1,2,3]")):
        last = train(*TINY, *words, metric, "epochs=1").summary["last"]
        assert last["jaccard"] == pytest.approx(last["miou"], abs=1e-6)
    torch_loss = ("loss=none", "loss._target_=torch.nn.CrossEntropyLoss")
    given = train(*TINY, *torch_loss, "epochs=1").summary["last"]["loss"]
    assert given == pytest.approx(train(*TINY, "epochs=1").summary["last"]["loss"], rel=1e-4)


@pytest.mark.extra(name="smp")
def test_losses_of_smp_train(train: Callable[..., Any], printed: Any, refused: Callable[..., None]) -> None:
    words = (*TINY, "loss=smp", "epochs=1")
    result = train(*words, "loss.options={classes: [1, 2]}")
    loss, same = (train(*words, *each).summary["last"]["loss"] for each in ((), ("loss.name=DiceLoss",)))
    # Without the background there is another loss; pixels of 255 do not count
    assert loss == same != result.summary["last"]["loss"]
    assert printed("eval", f"ckpt_path={result.directory}", "split=val")["metrics"]["loss"] > 0
    refused((*words, "loss.name=DiceLos"), "loss.name", "DiceLoss")
    refused((*words, "loss.options={widht: 1}"), "loss.options", "widht")


def test_a_checkpoint_of_a_data_set_that_is_gone_still_knows_its_classes(
    train: Callable[..., Any], printed: Any, shapes: Path
) -> None:
    directory = train(*TINY, "epochs=1").directory
    shapes.rename("moved")
    assert "per_label" in printed("eval", f"ckpt_path={directory}", "data.root=moved", "split=val")


def test_image_files_are_predicted(train: Callable[..., Any], accepted: Callable[..., Any], workdir: Path) -> None:
    directory = train(*TINY, "epochs=1").directory
    accepted("predict", f"ckpt_path={directory}", "input=shapes/val/images", "output=files.jsonl", "pictures=true")
    accepted("predict", f"ckpt_path={directory}", "input=val", "output=split.jsonl")
    names = ("files.jsonl", "split.jsonl")
    rows = [[json.loads(line) for line in (workdir / name).read_text().splitlines()] for name in names]
    for of_file, of_split in zip(*rows, strict=True):
        assert (workdir / of_file["mask"]).read_bytes() == (workdir / of_split["mask"]).read_bytes()
        with Image.open(workdir / of_file["picture"]) as picture:
            assert picture.size == (24, 24)


def test_tensorboard_gets_drawn_predictions_at_each_checkpoint_and_the_weights_keep_their_bits(
    train: Callable[..., Any],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = train(*TINY).summary["weights_sha256"]
    result = train(*TINY, "logger=tensorboard", "logger.tensorboard.images=true", "checkpoint.min_seconds=0")
    assert result.summary["weights_sha256"] == expected
    events = EventAccumulator(str(result.directory / "tensorboard"))
    events.Reload()
    assert len(events.Images("prediction/1")) == 2
    assert (events.Images("prediction/0")[0].width, events.Images("prediction/0")[0].height) == (24, 24)


@needs("export")
@pytest.mark.parametrize("words", [(), ("include_preprocessing=true",)], ids=["normalised", "bytes"])
def test_the_script_of_the_documentation_gives_the_masks_of_predict(
    train: Callable[..., Any], accepted: Callable[..., Any], workdir: Path, words: tuple[str, ...]
) -> None:
    directory = train(*TINY, "data.image_size=96", "optimizer.lr=0.02").directory
    accepted("export", f"ckpt_path={directory}", "format=onnx", "output=out", *words)
    description = json.loads((workdir / "out" / "model.json").read_text())
    assert description["preprocessing"].keys() >= {"resize", "padding"}
    assert description["postprocessing"]["mask"] == "largest logit of axis 1"
    (workdir / "pictures").mkdir()
    for number, size in enumerate([(60, 40), (40, 60), (150, 100)]):
        with Image.open(f"shapes/val/images/{number:03}.png") as image:
            image.resize(size).save(workdir / "pictures" / f"{number}.png")
    accepted("predict", f"ckpt_path={directory}", "input=pictures", "output=rows.jsonl")
    text = (Path(__file__).parents[2] / "docs" / "howto" / "segmentation.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"`masks.py`:\n\n```python\n(.*?)^```$", text, re.M | re.S)
    assert len([*filter(None, script.splitlines())]) <= 25
    (workdir / "masks.py").write_text(script)
    pictures = sorted(map(str, (workdir / "pictures").iterdir()))
    subprocess.run([sys.executable, "masks.py", "out", *pictures], check=True, env={"PATH": ""})
    different, values = 0, set[int]()
    for line in (workdir / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        ours, theirs = (
            np.asarray(Image.open(path)) for path in (row["mask"], Path(row["path"]).with_suffix(".mask.png"))
        )
        assert ours.shape == theirs.shape
        different, values = different + int((ours != theirs).sum()), values | {*np.unique(ours).tolist()}
    # Resized pixels differ by a level of 255 here and there
    assert different <= 20
    assert len(values) > 1
