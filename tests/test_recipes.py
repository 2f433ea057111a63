"""The experiments that repeat published trainings: their hyper-parameters are those copied here from the sources, and they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs
from PIL import Image

_SGD = {"optimizer._target_": "torch.optim.SGD", "optimizer.momentum": 0.9, "optimizer.nesterov": False}
_TORCHVISION = "torchvision's references/classification/README.md"
_V1 = _SGD | {"optimizer.lr": 0.1, "optimizer.weight_decay": 1e-4, "data.batch_size": 8 * 32, "epochs": 90}
_V1 |= {"loss.label_smoothing": 0.0, "scheduler._target_": "runner.optim.schedules.Step", "optimizer.no_decay": None}
_V1 |= {"scheduler.every": 30, "scheduler.gamma": 0.1, "crop": 224, "resize": 256, "centre": 224, "hflip": 0.5}
_V2 = _SGD | {"optimizer.lr": 0.5, "optimizer.weight_decay": 2e-5, "data.batch_size": 8 * 128, "epochs": 600}
_V2 |= {"warmup_epochs": 5, "scheduler._target_": "runner.optim.schedules.Cosine", "loss.label_smoothing": 0.1}
_V2 |= {"crop": 176, "resize": 232, "centre": 224, "mixup": 0.2, "cutmix": 1.0, "erasing": 0.1, "repeats": 4}
# The decay counts for 32 steps, and is scaled by samples of a step * 32 / epochs
_V2 |= {"of_newest": (1 - 0.99998) * 1024 * 32 / 600 / 32}
_STRIKES_BACK = "Wightman et al. 2021, arXiv:2110.00476, table 2"
_A2 = {"optimizer._target_": "runner.optim.lamb.lamb", "optimizer.lr": 5e-3, "optimizer.weight_decay": 0.02}
_A2 |= {"data.batch_size": 2048, "epochs": 300, "warmup_epochs": 5, "repeats": 3, "data.drop_last": True, "p": 0.5}
_A2 |= {"loss._target_": "runner.optim.losses.BinaryCrossEntropy", "loss.target_threshold": 0.2, "crop": 224}
_A2 |= {"drop_path_rate": 0.05, "mixup": 0.1, "cutmix": 1.0, "magnitude": 7, "centre": 224, "resize": 235}
_A2 |= {"optimizer.no_decay": "auto"}
_A1 = _A2 | {"epochs": 600, "optimizer.weight_decay": 0.01, "mixup": 0.2}
_A3 = _A2 | {"epochs": 100, "optimizer.lr": 8e-3, "magnitude": 6, "crop": 160, "repeats": 1}
_A3 |= {"drop_path_rate": 0.0}
_FFCV = "libffcv/ffcv-imagenet, rn18_configs"
_R18 = _SGD | {"optimizer.lr": 0.5, "optimizer.weight_decay": 5e-5, "data.batch_size": 1024, "data.drop_last": True}
_R18 |= {"loss.label_smoothing": 0.1, "optimizer.no_decay": "auto", "resize": round(256 * 256 / 224)}
_R18 |= {"crop": 192, "smallest": 160, "centre": 256, "epochs": 16, "begin": 11, "end": 13, "warmup_epochs": 2}
_DEIT = {"optimizer._target_": "torch.optim.AdamW", "optimizer.lr": 5e-4 * 1024 / 512, "optimizer.weight_decay": 0.05}
_DEIT |= {"data.batch_size": 1024, "epochs": 300, "warmup_epochs": 5, "drop_path_rate": 0.1, "repeats": 3}
_DEIT |= {"loss.label_smoothing": 0.1, "magnitude": 9, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25, "crop": 224}
_DEIT |= {"scheduler.final": 1e-5 / 1e-3, "resize": 256, "centre": 224, "data.drop_last": True, "p": 0.5}
_DEEPLAB = _SGD | {"optimizer.lr": 0.01, "optimizer.weight_decay": 5e-4, "data.batch_size": 4 * 4, "max_steps": 20000}
_DEEPLAB |= {"scheduler.name": "PolynomialLR", "power": 0.9, "scheduler.interval": "step", "data.image_size": 512}
_DEEPLAB |= {"scales": [0.5, 2.0], "task.aux_weight": 0.4, "sync_batchnorm": True, "data.hflip": 0.5}
_VOC = _SGD | {"optimizer.lr": 0.01, "optimizer.weight_decay": 1e-4, "data.batch_size": 8 * 2, "epochs": 4 * 3}
_VOC |= {"scheduler.every": 3 * 3, "scheduler.gamma": 0.1, "min_size": 600, "max_size": 1000, "hflip": 0.5}
_RTDETR = {"optimizer._target_": "torch.optim.AdamW", "optimizer.lr": 1e-4, "optimizer.weight_decay": 1e-4}
_RTDETR |= {
    "data.batch_size": 16,
    "epochs": 120,
    "of_newest": 1 - 0.9999,
    "grad_clip": {"norm": 0.1, "value": None, "agc": None},
}
_RTDETR |= {"optimizer.betas": [0.9, 0.999], "scheduler._target_": "runner.optim.schedules.Constant", "model.size": 640}
_RTDETR |= {"scheduler.warmup": 0.01, "decoder_layers": 3, "hidden_expansion": 0.5, "amp": "auto"}
_RTDETR |= {"encoder_in_channels": [128, 256, 512], "freeze_backbone_batch_norms": False}
_SMP = {
    "optimizer._target_": "torch.optim.Adam",
    "optimizer.lr": 2e-4,
    "optimizer.weight_decay": 0,
    "model.name": "fpn",
}
_SMP |= {
    "scheduler._target_": "runner.optim.schedules.Cosine",
    "scheduler.final": 1e-5 / 2e-4,
    "loss.name": "DiceLoss",
}
_SMP |= {"loss._target_": "runner.optim.losses.smp_loss", "model.encoder_weights": "imagenet"}
_PETS = _SMP | {
    "model.encoder": "resnet34",
    "epochs": 10,
    "data.batch_size": 64,
    "sides": [256, 256],
    "classes": [1],
}
_CAMVID = _SMP | {"model.encoder": "resnext50_32x4d", "epochs": 50, "data.batch_size": 32, "cut": 320, "hflip": 0.5}
_CAMVID |= {"translate": [0.1, 0.1], "scale": [0.5, 1.5], "padding": [0, (384 - 360) // 2]}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "imagenet_resnet50_v1": (_TORCHVISION, _V1),
    "imagenet_resnet50_v2": (_TORCHVISION, _V2),
    "imagenet_resnet50_a1": (_STRIKES_BACK, _A1),
    "imagenet_resnet50_a2": (_STRIKES_BACK, _A2),
    "imagenet_resnet50_a3": (_STRIKES_BACK, _A3),
    "imagenet_resnet18_16ep": (_FFCV, _R18),
    "imagenet_resnet18_88ep": (_FFCV, _R18 | {"epochs": 88, "begin": 65, "end": 76}),
    "imagenet_deit_small": ("Touvron et al. 2021, arXiv:2012.12877, table 9", _DEIT),
    "voc_deeplabv3": ("MMSegmentation, deeplabv3_r50-d8_4xb4-20k_voc12aug-512x512", _DEEPLAB),
    "pets_fpn": ("segmentation_models.pytorch, examples/binary_segmentation_intro.ipynb", _PETS),
    "camvid_fpn": ("segmentation_models.pytorch, examples/camvid_segmentation_multiclass.ipynb", _CAMVID),
    "voc_faster_rcnn": ("MMDetection, faster-rcnn_r50_fpn_1x_voc0712", _VOC),
    "detection": ("RT-DETR, rtdetrv2_r18vd_120e_coco.yml and include/optimizer.yml", _RTDETR),
}
"""Source and hyper-parameters of each experiment."""


def _described(values: Any) -> dict[str, Any]:
    """The keys of a config that stand alone, and numbers of its transforms under the names of the sources."""
    transform = values["transform"]
    parts = {part["_target_"].rpartition(".")[2]: part for part in (transform["mix"] or {}).get("choices", [])}
    for part in (*transform["sample_eval"], *transform["sample_train"], *transform["train"]):
        parts[part["_target_"].rpartition(".")[2]] = part
    found = {
        "crop": parts.get("RandomResizedCrop", {}).get("size"),
        "centre": parts.get("CenterCrop", {}).get("size"),
        "scales": parts.get("ScaleCrop", {}).get("scale"),
        "resize": values["data"].get("image_size"),
        "hflip": (parts.get("RandomFlip") or parts.get("RandomHorizontalFlip") or {}).get("p", 0.5),
        "repeats": (values["data"]["batch_sampler"] or {"repeats": 1})["repeats"],
        "mixup": parts.get("Mixup", {}).get("alpha"),
        "cutmix": parts.get("CutMix", {}).get("alpha"),
        "erasing": parts.get("RandomErasing", {}).get("p"),
        "p": parts.get("RandAugment", {}).get("p", 1.0),
        "magnitude": parts.get("RandAugment", {}).get("magnitude", 0) / 30 * 10,  # of 10, in timm
        "warmup_epochs": values["scheduler"].get("warmup", 0) * (values["epochs"] or 0),
        "sides": parts.get("Resize", {}).get("size"),
        "cut": parts.get("RandomCrop", {}).get("size"),
        "padding": parts.get("Pad", {}).get("padding"),
        **{key: parts.get("RandomAffine", {}).get(key) for key in ("translate", "scale")},
        "of_newest": 1 - (values["ema"] or 0),
        **parts.get("GrowingSize", {}),
        **(values["model"].get("options") or {}),
        **(values["loss"].get("options") or {}),
        **(values["scheduler"].get("options") or {}),
    }
    sections = ("optimizer", "scheduler", "loss", "data", "model", "task")
    return found | values | {f"{name}.{key}": value for name in sections for key, value in values[name].items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("smp") if "fpn" in name else ()) for name in PUBLISHED]
)
def test_the_hyper_parameters_are_those_of_the_source(name: str, compose: Any) -> None:
    source, published = PUBLISHED[name]
    found = _described(compose(f"experiment={name}", "data.root=images").values)
    for key, value in published.items():
        expected = pytest.approx(value, rel=1e-3) if isinstance(value, (int, float)) else value
        assert found[key] == expected, (key, source)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of noise in each of two classes and splits."""
    root = tmp_path_factory.mktemp("photographs")
    generator = torch.Generator().manual_seed(0)
    for split, name in ((split, name) for split in ("train", "val", "test") for name in "ab"):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(256, (320, 300, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg")
    return root


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs("timm")] if name.endswith(("_a1", "_a2", "_a3", "_deit_small")) else [])
        for name in PUBLISHED
        if name.startswith("imagenet")
    ],
)
def test_it_trains_and_a_resumed_run_ends_with_the_same_bits(name: str, photographs: Path, train: Any) -> None:
    small = ["data.batch_size=4", "data.drop_last=false", "evaluate.batch_size=4", "amp=false", "epochs=3"]
    small += ["scheduler.total_steps=6"]  # max_steps would change the schedule
    if "resnet" in name:
        sizes = ("transform.sample_train.0.size=64", "transform.sample_eval.0.size=64", "data.image_size=72")
        small += ["model.name=resnet18", *sizes]
    else:
        small += ["model.name=deit_tiny_patch16_224"]
    if "resnet18" in name:
        small += ["transform.train.0.smallest=32", "transform.train.0.begin=0", "transform.train.0.end=2"]
    words = (f"experiment={name}", f"data.root={photographs}", *small)
    stopped = train(*words, "max_steps=1")
    assert stopped.summary["global_step"] == 1
    assert "no effect" not in stopped.out + stopped.err
    resumed, whole = train(f"ckpt_path={stopped.directory}", "max_steps=5"), train(*words, "max_steps=5")
    assert resumed.summary["global_step"] == 5
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert set(resumed.summary["test"]) >= {"loss", "accuracy"}


@needs("smp")
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*parameter 'mode' is for deprecation:DeprecationWarning")
def test_recipes_of_segmentation_train_on_data_as_it_is_published(workdir: Path, train: Any, json_of: Any) -> None:
    # Oxford pets: 1 is the animal, 2 the ground, 3 the outline
    pets = workdir / "data" / "oxford-iiit-pet"
    (pets / "annotations" / "trimaps").mkdir(parents=True)
    (pets / "images").mkdir()
    lines = [f"Cat_{number} 1 1 1\n" for number in range(20)]
    for part in ("trainval", "test"):
        (pets / "annotations" / f"{part}.txt").write_text("".join(lines))
    streets = workdir / "camvid"
    for number in range(20):
        values = torch.randint(1, 4, (40, 60), dtype=torch.uint8).numpy()
        Image.fromarray(values * 60).convert("RGB").save(pets / "images" / f"Cat_{number}.jpg")
        Image.fromarray(values).save(pets / "annotations" / "trimaps" / f"Cat_{number}.png")
    for split in ("train", "val", "test"):
        for kind in ("images", "masks"):
            (streets / split / kind).mkdir(parents=True)
        values = torch.randint(0, 12, (360, 480), dtype=torch.uint8).numpy()
        Image.fromarray(values * 20).convert("RGB").save(streets / split / "images" / "0.png")
        Image.fromarray(values).save(streets / split / "masks" / "0.png")
    small = ("model.encoder=resnet18", "model.encoder_weights=null", "max_steps=1", "epochs=null", "threads=1")
    animal = train("experiment=pets_fpn", "data.root=data", "data.batch_size=2", *small)
    assert {"miou", "pixel_accuracy"} <= {*animal.summary["test"]}
    street = train("experiment=camvid_fpn", "data.root=camvid", "data.batch_size=1", *small)
    found = json_of("eval", f"ckpt_path={street.directory}", "split=test", "threads=1")
    assert len(found["per_label"]) == 12
