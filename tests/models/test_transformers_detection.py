"""Detectors of transformers: losses and boxes as those of torchvision, weights, and runs through the composed config."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_objects
import pytest
import torch
from extended import some
from extras import needs
from PIL import Image
from tiny_detectors import FAMILIES, RT_DETR, WORDS

from runner.base.errors import UserError
from runner.data.sources.detection import yolo
from runner.models.transformers_detection import detector

pytestmark = [needs("detection"), needs("transformers")]
MOSAIC = "transform.sample_train.1.p=1"
OF_TORCHVISION = (
    "experiment=detection", "data.root=drawn", *drawn_objects.COCO, "model=torchvision_detection",
    "model.name=fasterrcnn_mobilenet_v3_large_320_fpn",
)  # fmt: skip


def batch() -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Images of different sizes, the second one without an object."""
    boxes = torch.tensor([[4.0, 6, 40, 50]])
    targets = [{"boxes": boxes, "labels": torch.tensor([3])}]
    targets += [{"boxes": boxes[:0], "labels": torch.empty(0, dtype=torch.int64)}]
    return [torch.rand(3, 64, 80), torch.rand(3, 70, 64)], targets


@pytest.fixture
def drawn(workdir: Path) -> Path:
    drawn_objects.draw(workdir / "drawn", "train", 6, 0)
    drawn_objects.draw(workdir / "drawn", "val", 5, 1)
    return workdir / "drawn"


@pytest.mark.parametrize("size", [64, None])
@pytest.mark.parametrize(("name", "options"), some(FAMILIES, 0, 1, 2, several=True))
def test_a_model_gives_losses_and_objects(name: str, options: dict[str, Any], size: int | None) -> None:
    model, (images, targets) = detector(name, 4, size=size, options=options), batch()
    model.eval()
    with torch.inference_mode():  # first: what transformers caches here is used in training
        found = model(images)
    for each, image in zip(found, images, strict=True):
        assert not each["boxes"].requires_grad
        assert each["labels"].min() >= 1
        assert each["labels"].max() <= 3
        largest = each["boxes"].amax(0)
        assert bool((largest <= 1.5 * torch.tensor(image.shape[1:]).flip(0).repeat(2)).all())
    model.train()
    total: list[torch.Tensor] = []
    model.net.register_forward_hook(lambda _, __, output: total.append(output.loss))  # type: ignore[union-attr,func-returns-value,operator]
    for given in (targets, [targets[1], targets[1]]):
        model.zero_grad()
        losses = model(images, given)
        assert {"loss_bbox", "loss_giou"} < set(losses)
        torch.testing.assert_close(sum(losses.values()), total[-1])
        sum(losses.values()).backward()
        # Ranks expect a gradient of each weight, also from images without an object
        trained = [(label, weight) for label, weight in model.named_parameters() if weight.requires_grad]
        assert [label for label, weight in trained if weight.grad is None] == []
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.stack([*model(images, targets).values()]).isfinite().all()
        boxes = model.eval()(images)[0]["boxes"]
    assert not boxes.equal(boxes.bfloat16().float())


@pytest.mark.parametrize(("name", "options"), some(FAMILIES, 0, 2, several=True))
def test_norms_and_backbones_with_random_weights_learn(name: str, options: dict[str, Any]) -> None:
    model = detector(name, 4, options=options, train_backbone=True)
    assert not [label for label, weight in model.named_parameters() if "backbone" in label and not weight.requires_grad]
    norms = [each for each in model.modules() if "BatchNorm" in type(each).__name__]
    assert norms
    assert all(isinstance(each, torch.nn.BatchNorm2d) and bool((each.weight == 1).all()) for each in norms)


def test_norms_of_a_backbone_stay_frozen_in_runs_without_the_key() -> None:
    frozen = detector("rt_detr_v2", 4, options=RT_DETR)
    assert not [name for name, _ in frozen.named_parameters() if "backbone" in name and "normalization" in name]


@pytest.mark.parametrize("size", [64, None])
def test_boxes_are_those_of_the_image_whatever_its_size(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (images, targets) = detector("rt_detr_v2", 4, size=size, options=RT_DETR), batch()
    seen: list[Any] = []

    def net(**given: Any) -> Any:
        """Finds what is labelled in the first image, in both."""
        seen.append(given)
        boxes = seen[0]["labels"][0]["boxes"].repeat(2, 1, 1)
        logits = torch.tensor([[[-9.0, -9, 9]]]).repeat(2, 1, 1)
        return type("Output", (), {"loss_dict": {}, "logits": logits, "pred_boxes": boxes})

    monkeypatch.setattr(model, "forward", model.forward)
    monkeypatch.setattr(model.net, "forward", net)
    model(images, targets)
    assert seen[0]["labels"][0]["class_labels"].tolist() == [2]
    found = model.eval()(images)
    torch.testing.assert_close(found[0]["boxes"], targets[0]["boxes"])
    assert found[0]["labels"].tolist() == [3]
    pixels = seen[1]["pixel_values"]
    assert pixels.shape == ((2, 3, 64, 64) if size else (2, 3, 96, 96))
    if size:  # the square is that of each image
        torch.testing.assert_close(found[1]["boxes"], targets[0]["boxes"] * torch.tensor([0.8, 70 / 64]).repeat(2))
    else:
        assert pixels[1][:, :70, :64].equal(images[1])
        assert seen[1]["pixel_mask"].sum((1, 2)).tolist() == [64 * 80, 70 * 64]


@pytest.mark.parametrize(("name", "options"), some(FAMILIES, 1, 2, several=True))
def test_float64_trains_or_is_refused(name: str, options: dict[str, Any]) -> None:
    model, (images, targets) = detector(name, 4, size=64, options=options).double(), batch()
    images = [image.double() for image in images]
    if name in ("d_fine", "detr"):
        with pytest.raises(UserError, match="float32") as caught:
            model(images, targets)
        assert caught.value.problems[0].key == "dtype"
    else:
        assert {loss.dtype for loss in model(images, targets).values()} == {torch.float64}
    assert len(model.eval()(images)) == 2


def test_weights_of_a_folder_are_used_where_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = detector("rt_detr_v2", 4, options=RT_DETR)
    for each in trained.modules():
        if isinstance(each, torch.nn.BatchNorm2d):
            torch.nn.init.constant_(each.weight, 0.5)
    trained.net.save_pretrained(tmp_path / "model")  # type: ignore[union-attr,operator]
    folder = str(tmp_path / "model")
    known = trained.state_dict()
    for same in (detector("rt_detr_v2", 4, folder), detector(folder, 4, folder)):
        assert all(value.equal(known[key]) for key, value in same.state_dict().items())
    assert caplog.text == ""
    other = detector("rt_detr_v2", 7, folder, options={"num_denoising": 4}).state_dict()
    assert re.search(r"model: 7 tensors start from random values: model\.\w*class_embed", caplog.text)
    assert capfd.readouterr().err == ""  # neither a bar nor a report of transformers
    different = {key for key, value in other.items() if value.shape != known[key].shape}
    assert {key.split(".")[-2] for key in different} <= {"0", "1", "enc_score_head", "denoising_class_embed"}
    assert all(value.equal(known[key]) for key, value in other.items() if key not in different)
    (tmp_path / "model/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="SafetensorError") as caught:
        detector("rt_detr_v2", 4, folder)
    assert caught.value.problems[0].key == "model.weights"
    # The same structure for a checkpoint, without the file of the weights
    (tmp_path / "model/model.safetensors").unlink()
    empty = detector("rt_detr_v2", 7, folder, fetch_weights=False).state_dict()
    assert {key: value.shape for key, value in empty.items()} == {key: value.shape for key, value in other.items()}
    with pytest.raises(UserError, match=r"model\.safetensors") as caught:
        detector("rt_detr_v2", 4, folder)
    assert caught.value.problems[0].key == "model.weights"
    torch.save(trained.net.state_dict(), tmp_path / "model/pytorch_model.bin")  # type: ignore[union-attr]
    with pytest.raises(UserError, match="safetensors"):  # and no pickle
        detector("rt_detr_v2", 4, folder)


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('code was run')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForObjectDetection": "own.Model"}}
    for model_type in ("own", "rt_detr_v2"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type, **RT_DETR}))
        if model_type == "own":
            with pytest.raises(UserError, match="family own"):
                detector(str(tmp_path), 4)
        else:
            assert type(detector(str(tmp_path), 4).net).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        ({"name": "yolos"}, "model.name", "conditional_detr, deformable_detr"),
        ({"name": "rt_detr_v3"}, "model.name", "did you mean 'rt_detr"),
        ({"name": "someone/model"}, "model.name", "does not answer"),
        ({"weights": "someone/model"}, "model.weights", "does not answer"),
        ({"weights": "someone/model", "fetch_weights": False}, "model.weights", "someone/model could not be loaded"),
        ({"options": {"d_modle": 3}}, "model.options.d_modle", "did you mean 'd_model'?"),
        ({"options": {"num_labels": 3}}, "model.options.num_labels", "no such argument"),
        ({"options": {"backbone": "someone/model"}}, "model.options.backbone", "no such argument"),
        ({"options": {"d_model": "a"}}, "model.options", "expected int"),
        ({"options": {"backbone_config": {"depths": [1]}}}, "model.options", "rt_detr_v2 cannot be built"),
    ],
)
def test_what_there_is_not_is_a_sentence(arguments: dict[str, Any], key: str, reason: str, offline: Path) -> None:
    with pytest.raises(UserError) as caught:
        detector(**{"name": "rt_detr_v2", "num_classes": 4} | arguments)
    assert caught.value.problems[0].key == key
    assert reason in str(caught.value)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match=r"pip install 'runner\[transformers\]', or experiment=detection_torchvision"):
        detector("rt_detr_v2", 4)


@pytest.mark.extended
def test_drawn_boxes_are_found_after_200_steps(
    train: Callable[..., Any], json_of: Any, accepted: Any, drawn: Path
) -> None:
    plain = "[{_target_: torchvision.transforms.v2.ToImage}]"
    words = ("transform=none", f"transform.sample_train={plain}", f"transform.sample_eval={plain}", "ema=0.9")
    words = (*words, "lr=0.002", "grad_clip.norm=10", "amp=bf16", "evaluate.every_epochs=67", "optimizer.lr_mult=null")
    result = train(
        *WORDS, *words, "epochs=67", "data.dataset.val_images=images/train", "data.dataset.val_annotations=train.json"
    )
    assert result.summary["last"]["ema_map_50"] > 0.5
    checkpoint = f"ckpt_path={result.directory}"
    scores = json_of("eval", checkpoint, "split=val", "threads=1")["metrics"]
    assert scores["map_50"] == pytest.approx(result.summary["last"]["ema_map_50"])
    accepted("predict", checkpoint, "input=drawn/images/train", "output=found.jsonl", "threads=1")
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {label for row in rows for label in row["labels"]} <= {1, 2}


@pytest.mark.parametrize("words", [WORDS, OF_TORCHVISION], ids=["transformers", "torchvision"])
def test_the_backbone_of_the_recipe_learns_ten_times_more_slowly(
    compose: Any, drawn: Path, words: tuple[str, ...]
) -> None:
    from runner.config.load import resolve_config
    from runner.config.schema.train import Train
    from runner.train import build_run

    run = build_run(resolve_config(compose(*words), Train))
    rates = {group["name"]: group["lr"] for group in run.state.optimizer.param_groups}
    assert {name: rate for name, rate in rates.items() if "backbone" in name} == {
        "*backbone": pytest.approx(rates["all others"] / 10),
        "*backbone, no decay": pytest.approx(rates["all others"] / 10),
    }


@pytest.mark.parametrize("size", [64, None])
def test_four_channels_are_normalised_by_the_mean_over_the_colours(size: int | None) -> None:
    options = dict(FAMILIES)["detr"]
    options = options | {"backbone_config": options["backbone_config"] | {"num_channels": 4}}
    model, (images, targets) = detector("detr", 4, size=size, options=options), batch()
    images = [torch.cat([image, image[:1]]) for image in images]
    assert bool(torch.stack([*model(images, targets).values()]).isfinite().all())
    if size:
        seen: list[Any] = []
        model.net.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)  # type: ignore[union-attr,operator]
        model.eval()([torch.full((4, 64, 64), 0.5)])
        found = model.export_model()(torch.full((1, 4, 64, 64), 0.5))  # type: ignore[operator]
        assert found["logits"].shape == (1, 20, 4)
        own, exported = (each["pixel_values"] for each in seen)
        torch.testing.assert_close(own, torch.full((1, 4, 64, 64), (0.5 - 0.449) / 0.226), rtol=0, atol=0.001)
        torch.testing.assert_close(exported, own)


@needs("export")
@pytest.mark.extended
def test_images_of_four_channels_train_a_detector_of_as_many(
    train: Any, accepted: Any, json_of: Any, drawn: Path
) -> None:
    for path in drawn.rglob("*.png"):
        image = Image.open(path)
        image.putalpha(image.getchannel(0))
        image.save(path)
    words = ("data.dataset.channels=auto", "model.options.backbone_config.num_channels=4", "transform=none")
    mosaic = "transform.sample_train=[{_target_: runner.data.transforms.detection.Mosaic, p: 1}]"
    directory = train(*WORDS, *words, mosaic).directory
    accepted("predict", f"ckpt_path={directory}", "input=drawn/images/val", "output=found.jsonl", "threads=1")
    assert len(Path("found.jsonl").read_text().splitlines()) == 5
    record = json_of("export", f"ckpt_path={directory}", "format=onnx", "threads=1")
    assert record["input"]["shape"] == ["batch", 4, 64, 64]
    assert record["preprocessing"]["colours"] == "4 channels"
    (drawn / "classes.txt").write_text("tall\nwide\n")
    image, target = yolo("drawn", channels="auto")["val"][0]
    assert image.shape == (4, 32, 40)
    assert len(target["boxes"]) == 1


def test_a_run_whose_boxes_are_no_numbers_has_diverged(run: Callable[..., Any], drawn: Path) -> None:
    result = run("train", *WORDS, "lr=1e12", "grad_clip.norm=null", "scheduler.warmup=0", "logger=none")
    assert result.status == 3, result.err
    assert "diverged: the gradients of step 2" in result.err


@pytest.mark.parametrize(
    ("words", "step"),
    some(
        [((), 2), (("model.name=d_fine",), 4), (("amp=bf16", "accumulate=2", "data.batch_size=1"), 2)], 0, several=True
    ),
)
def test_workers_and_kills_give_the_same_weights(
    words: tuple[str, ...], step: int, train: Callable[..., Any], killed: Callable[..., Path], drawn: Path
) -> None:
    expected = train(*WORDS, MOSAIC, *words).summary["weights_sha256"]
    assert train(*WORDS, MOSAIC, *words, "seed=1").summary["weights_sha256"] != expected
    directory = killed(step, *WORDS, MOSAIC, *words, "checkpoint.every_steps=1", "checkpoint.min_seconds=0")
    resumed = train(f"ckpt_path={directory}", "callbacks=none", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == expected


def test_a_batch_counts_by_its_boxes_but_those_around_crowds() -> None:
    model, (images, targets) = detector("rt_detr_v2", 4, size=64, options=RT_DETR), batch()
    boxes = torch.tensor([[4.0, 6, 40, 50]] * 3)
    crowd = {"boxes": boxes, "labels": torch.ones(3, dtype=torch.int64), "iscrowd": torch.tensor([0, 1, 0])}
    counts = [model.loss_count((images, given)) for given in (targets, [crowd, targets[0]], [targets[1]])]  # type: ignore[operator]
    assert [int(count) for count in counts] == [1, 3, 1]


@pytest.mark.parametrize("words", some([("data.batch_size=3", "accumulate=2"), ("devices=2",)], 0))
def test_a_batch_whose_parts_have_unequal_numbers_of_boxes_trains_the_same_weights(
    words: tuple[str, ...], train: Callable[..., Any], drawn: Path
) -> None:
    options = dict(FAMILIES)["conditional_detr"] | {"dropout": 0.0}
    plain = "[{_target_: torchvision.transforms.v2.ToImage}]"
    same = (
        *WORDS, "model.name=conditional_detr", "~model.options", "+model.options=" + json.dumps(options).replace('"', ""),
        "dtype=float64", "amp=false", "optimizer=sgd", "optimizer.lr_mult=null", "lr=0.1", "ema=null", "transform=none",
        "freeze=[net.model.backbone]",  # its BatchNorm would have other statistics of parts
        f"transform.sample_train={plain}", f"transform.sample_eval={plain}", "data.batch_size=6", "max_steps=2",
    )  # fmt: skip
    one, other = train(*same), train(*same, *words)
    torch.testing.assert_close(other.last["model"], one.last["model"], rtol=0, atol=1e-10)


@pytest.mark.extended
def test_two_ranks_train_also_where_one_has_no_object(train: Callable[..., Any], drawn: Path) -> None:
    # A batch of two is an image for each rank, and every fourth image has no object
    last = train(*WORDS, "devices=2", "transform.sample_train.1.p=0").summary["last"]
    assert "ema_map" in last
