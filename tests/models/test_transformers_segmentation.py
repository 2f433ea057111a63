"""Segmentation models of transformers: they learn drawn masks, resume, load stored weights, and are exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drawn_masks import draw
from extended import some
from extras import needs

from runner.models.transformers_segmentation import segmenter

pytestmark = pytest.mark.extra(name="transformers")

_VIT = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, patch_size: 4"
_SWIN = "{model_type: swin, embed_dim: 16, depths: [1, 1], num_heads: [2, 2], window_size: 2, patch_size: 2, out_indices: [1, 2]}"
TINY = {
    "segformer": "{hidden_sizes: [16, 16, 32, 32], depths: [1, 1, 1, 1], num_attention_heads: [1, 1, 2, 2]}",
    "upernet": f"{{hidden_size: 32, use_auxiliary_head: false, backbone_config: {_SWIN}}}",
    "dinov2": f"{{{_VIT}, image_size: 32}}",
    "dinov2_with_registers": f"{{{_VIT}, image_size: 32, out_indices: [1, 2]}}",
    "dinov3_vit": f"{{{_VIT}, intermediate_size: 64, out_indices: [1, 2]}}",
}
WORDS = (
    "experiment=segmentation", "data.root=shapes", "data.image_size=32", "data.num_workers=0", "data.batch_size=8",
    "model=transformers_segmentation", "epochs=2", "evaluate.batch_size=7",
)  # fmt: skip


def tiny(name: str, **options: Any) -> Any:
    """A tiny model of three classes, in evaluation mode."""
    return segmenter(name, 3, options={**yaml.safe_load(TINY[name]), **options}).eval()


def words_of(name: str) -> tuple[str, ...]:
    return *WORDS, f"model.name={name}", f"model.options={TINY[name]}"


@pytest.fixture(autouse=True)
def shapes(workdir: Path) -> Path:
    return draw(workdir / "shapes", train=16, val=4, size=32)


@pytest.mark.parametrize("name", some(TINY))
def test_a_tiny_model_learns_drawn_masks_in_bfloat16(train: Callable[..., Any], shapes: Path, name: str) -> None:
    shutil.rmtree(shapes / "val")
    shutil.copytree(shapes / "train", shapes / "val")
    words = ("amp=true", "channels_last=true", "ema=0.9", "transform.sample_train=${transform.sample_eval}")
    result = train(*words_of(name), *words, "epochs=40", "evaluate.every_epochs=20", "optimizer.lr=0.005")
    assert result.summary["last"]["miou"] > 0.8


@pytest.mark.parametrize("name", some(TINY, 2))
def test_a_resumed_run_has_the_same_bits_and_its_images_are_predicted(
    train: Callable[..., Any], killed: Callable[..., Path], accepted: Any, json_of: Any, workdir: Path, name: str
) -> None:
    expected = train(*words_of(name)).summary
    directory = killed(3, *words_of(name), "checkpoint.every_steps=1")
    again = train(f"ckpt_path={directory}", "callbacks=none")
    assert (again.summary["weights_sha256"], again.summary["best"]) == (expected["weights_sha256"], expected["best"])
    evaluated = json_of("eval", f"ckpt_path={again.directory}", "split=val")
    assert evaluated["metrics"]["miou"] == again.summary["best"]["value"]
    accepted("predict", f"ckpt_path={again.directory}", "input=shapes/val/images", "output=found.csv")
    assert len(list((workdir / "found_images").iterdir())) == 4


EXPORTED = {**{name: words_of(name) for name in TINY}, "lraspp": (*WORDS, "model=torchvision_segmentation")}


@needs("export")
@pytest.mark.parametrize("name", some(EXPORTED))
def test_exported_models_give_the_logits_of_any_number_of_images(
    train: Callable[..., Any], json_of: Callable[..., Any], workdir: Path, name: str
) -> None:
    directory = train(*EXPORTED[name], "epochs=1").directory
    formats = "format=safetensors,onnx,torch_export,torchscript"
    record = json_of("export", f"ckpt_path={directory}", formats, "batch_sizes=[1,5]", "threads=1")
    assert {row["format"] for row in record["comparison"]} == {"safetensors", "onnx", "torch_export", "torchscript"}
    assert max(row["max_rel"] for row in record["comparison"]) < 1e-5


@pytest.mark.parametrize("name", ["segformer", "upernet"])
def test_a_stored_model_gives_its_logits_and_only_a_head_of_other_classes_is_new(workdir: Path, name: str) -> None:
    stored, images = tiny(name), torch.rand(2, 3, 32, 32)
    stored.model.save_pretrained("stored")
    for source, weights in ((name, "stored"), ("stored", "stored")):
        loaded = segmenter(source, 3, weights).eval()
        assert all(value.equal(loaded.state_dict()[key]) for key, value in stored.state_dict().items())
        torch.testing.assert_close(loaded(images), stored(images), rtol=1e-6, atol=1e-7)
    assert not segmenter("stored", 3)(images).equal(stored(images))
    others = segmenter(name, 5, "stored").state_dict()
    new = {key for key, value in stored.state_dict().items() if not others[key].equal(value)}
    assert new == {"model.decode_head.classifier.weight", "model.decode_head.classifier.bias"}
    assert [key for key in new if len(others[key]) != 5] == []


@pytest.mark.parametrize("name", ["dinov2", "dinov3_vit"])
def test_weights_of_a_backbone_get_a_new_head(workdir: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModel

    stored = AutoModel.from_config(tiny(name).model.backbone.config)
    stored.save_pretrained("stored")
    assert AutoConfig.from_pretrained("stored").model_type == name
    for source in (name, "stored"):
        tensors = segmenter(source, 3, "stored", {"out_indices": [1, 2]}).model.backbone.state_dict()
        assert [key for key, value in tensors.items() if not stored.state_dict()[key].equal(value)] == []
        assert stored.state_dict().keys() - tensors == {"embeddings.mask_token"}  # without an effect, or gradients


@pytest.mark.extended
def test_tensors_of_a_checkpoint_with_other_classes_are_loaded_but_for_the_head(
    train: Callable[..., Any], rejected: Callable[..., Any], shapes: Path
) -> None:
    words = words_of("segformer")
    first = train(*words, "epochs=1")
    with (shapes / "classes.txt").open("a") as names:
        names.write("\nstar\nring")
    words = (*words, f"init_from={first.directory}", "epochs=1")
    assert "init_mismatch" in rejected("train", *words).err
    frozen = ("init_mismatch=skip", "freeze=[model.segformer.*]")
    result = train(*words, *frozen)
    assert len(result.last["model"]["model.decode_head.classifier.weight"]) == 5
    for key, value in result.last["model"].items():
        if key.startswith("model.segformer."):
            assert value.equal(first.last["model"][key])


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("model.name=sam",), "model.name", "dinov3_vit"),
        (("model.name=segformer", "model.options={depth: [1]}"), "model.options.depth", "depths"),
        (
            ("model.name=upernet", "model.options={backbone_config: {model_type: swin, embed: 1}}"),
            "model.options.backbone_config.embed",
            "embed_dim",
        ),
        (("model.name=segformer", "model.options={depths: [a]}"), "model.options", "depths"),
        (("model.name=dinov2", "model.options={out_indices: [77]}"), "model.options", "out_indices"),
        (("model.weights=nowhere",), "model.weights", "config.json"),
    ],
)
def test_a_wrong_value_is_answered_with_its_key(
    rejected: Callable[..., Any], words: Any, key: str, reason: str, offline: Path
) -> None:
    err = rejected("train", *WORDS, *words).err
    assert f"{key}:" in err
    assert reason in err


def test_without_transformers_the_error_says_what_to_install(
    rejected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert "pip install 'runner[transformers]'" in rejected("train", *WORDS).err


@pytest.mark.parametrize("name", some(["segformer", "dinov2", "dinov2_with_registers", "dinov3_vit"]))
def test_two_processes_wait_for_no_gradient(train: Callable[..., Any], name: str) -> None:
    assert train(*words_of(name), "devices=2").summary["status"] == "finished"
