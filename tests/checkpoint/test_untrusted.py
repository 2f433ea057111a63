"""Nothing in an untrusted file is executed: neither what is pickled in it nor its config."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.checkpoint.file import DamagedCheckpoint, read, write

Make = Callable[..., dict[str, Any]]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def refused(path: Path, target: Path, words: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        read(path)
    assert not target.exists(), "the file's code was run"


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_is_not_even_opened(protocol: int, tmp_path: Path) -> None:
    path, target = tmp_path / "bomb.pt", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Bomb(target), protocol=protocol))
    refused(path, target, "is not a checkpoint of runner's; init_from= starts a run")
    pickle.loads(path.read_bytes())
    assert target.exists(), "the bomb is a dud, and nothing was tested"


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_what_torch_saves_is_not_a_checkpoint(legacy: bool, tmp_path: Path) -> None:
    path, target = tmp_path / "bomb.pt", tmp_path / "ran"
    torch.save({"model": Bomb(target)}, path, _use_new_zipfile_serialization=not legacy)
    refused(path, target, "is not a checkpoint of runner's; init_from= starts a run")


EVIL = ("os.system", "subprocess.run", "logging.os.system", "builtins.eval", "runner.run.directory.os.system",
        "torch.serialization.os.system", "pathlib.Path.touch", "torch.hub.load")  # fmt: skip
SMALL = (
    "data=synthetic", "data.dataset.samples=32", "data.image_size=8", "data.batch_size=8", "epochs=1",
    "model=mlp", "transform=none", "evaluate.test=false",
)  # fmt: skip


def poisoned(checkpoint: Path, target: Path, place: str, evil: str) -> Path:
    """A copy of a checkpoint whose config wants to build something else."""
    found = read(checkpoint)
    config = yaml.safe_load(found["config"])
    node = {"_target_": evil, "_args_": [f"touch {target}"]}
    if place == "nested":
        config["model"]["hidden"] = [node]
    elif place == "list":
        config["transform"]["train"] = [node]
    else:
        config[place] = node if place == "model" else {"x": node}
    path = target.with_name("poisoned.safetensors")
    write(path, found | {"config": yaml.safe_dump(config)})
    return path


@pytest.fixture
def checkpoint(train_once: Callable[..., Any]) -> Path:
    return train_once(*SMALL).directory / "checkpoints" / "last.safetensors"


def test_a_config_that_names_other_things_builds_none_of_them(checkpoint: Path, workdir: Path, run: Any) -> None:
    target = workdir / "ran"
    unused = ("callbacks", "logger")  # by eval
    cases = [("model", evil) for evil in EVIL] + [(p, "os.system") for p in ("nested", "list", *unused)]
    for number, (place, evil) in enumerate(cases):
        path = poisoned(checkpoint, target, place, evil)
        for verb in ("train", "eval") if number in (0, 8) or place in unused else (("train", "eval")[number % 2],):
            result = run(verb, f"ckpt_path={path}", "threads=1", "log.progress=false", "log.curves=false")
            assert not target.exists(), f"{evil} was run"
            if verb == "eval" and place in unused:
                assert result.status == 0, (place, result.err)
                continue
            assert result.status == 2, (verb, place, evil, result.out)
            assert f"'{evil}'" in result.err
            assert "from a file" in result.err
            assert "Traceback" not in result.err


def test_the_refusal_says_how_to_trust_and_that_a_file_cannot_trust_itself(
    checkpoint: Path, workdir: Path, run: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "untrusted.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nfrom runner.models.mlp import MLP\nclass Net(MLP): pass\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    found = read(checkpoint)
    config = yaml.safe_load(found["config"])
    config["model"]["_target_"], config["trust"] = "untrusted.Net", ["untrusted"]
    write(workdir / "s.safetensors", found | {"config": yaml.safe_dump(config)})
    words = ("eval", "ckpt_path=s.safetensors", "split=val", "output=out", "threads=1")
    result = rejected(*words)
    assert "trust=[untrusted]" in result.err
    assert not (workdir / "imported").exists(), "the untrusted package was imported to find out"
    assert run(*words, "trust=[untrusted]").status == 0


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch ran']", "[1, 2]", "a: [", "model: ${oc.env:HOME}"], ids=str
)
def test_a_config_that_is_no_plain_mapping_is_a_sentence(
    text: str, checkpoint: Path, workdir: Path, rejected: Any
) -> None:
    write(workdir / "odd.safetensors", read(checkpoint) | {"config": text})
    rejected("eval", "ckpt_path=odd.safetensors")
    assert not (workdir / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position", 5), ("position", {}), ("position", {"epoch": 0, "batch": -1, "global_step": 0}),
        ("classes", None), ("model", None), ("optimizer", None), ("scheduler", 4), ("rng", []), ("metrics", {}),
        ("metrics", {"callbacks": {}, "data": 3}), ("metrics", {"callbacks": {}, "data": {"train": 3}}),
        ("metrics", {"callbacks": {}, "data": {"train": {"samples": "9", "content": "a"}}}),
        ("metrics", {"callbacks": {}, "data": {1: {"samples": 9, "content": "a"}}}),
        ("metrics", {"callbacks": {}, "data": {"train": {"samples": 9, "content": None}}}),
    ],
)  # fmt: skip
def test_contents_of_other_types_are_named(key: str, value: Any, tmp_path: Path, contents: Any) -> None:
    path = tmp_path / "odd.safetensors"
    write(path, contents(**{key: value}))
    with pytest.raises(DamagedCheckpoint, match=key):
        read(path)


@pytest.mark.parametrize(
    "averaged",
    [
        [],
        {"kind": "ema"},
        {"kind": "other", "updates": 1, "weights": None, "calibrated": True},
        {"kind": "ema", "updates": 1, "weights": None},
        {"kind": "ema", "updates": -1, "weights": None, "calibrated": True},
        {"kind": "ema", "updates": 1.5, "weights": None, "calibrated": True},
        {"kind": "swa", "updates": 1, "weights": None, "calibrated": 1},
        {"kind": "swa", "updates": 1, "weights": {"layer.weight": "text"}, "calibrated": True},
        {"kind": "swa", "updates": 1, "weights": [torch.zeros(1)], "calibrated": True},
    ],
    ids=str,
)
def test_averages_that_are_none_are_refused(averaged: Any, tmp_path: Path, contents: Make) -> None:
    path = tmp_path / "odd.safetensors"
    write(path, contents(averaged=averaged))
    with pytest.raises(DamagedCheckpoint, match="averaged is not a kind, a number of updates and tensors by name"):
        read(path)


def test_averages_as_a_run_saves_them_are_read(tmp_path: Path, contents: Make) -> None:
    made = contents()
    made["averaged"] = {"kind": "ema", "updates": 3, "weights": made["model"], "calibrated": True}
    write(tmp_path / "good.safetensors", made)
    assert read(tmp_path / "good.safetensors")["averaged"]["updates"] == 3


def dataset(**node: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["data"].update(dataset=node)


def transforms(key: str, target: str, **node: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["transform"].update({key: [{"_target_": target, **node}]})


FAKE = {"_target_": "torchvision.datasets.FakeData", "image_size": [3, 8, 8]}
CONV = {"in_channels": 3, "out_channels": 3, "kernel_size": 3}


@pytest.mark.extended
def test_parts_of_a_config_that_do_not_work_are_sentences_that_name_their_key(
    checkpoint: Path, workdir: Path, rejected: Any
) -> None:
    found = read(checkpoint)
    cases: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (dataset(**FAKE, size=10**12), "data.dataset: its 'train' split has 1,000,000,000,000 samples"),
        (dataset(**FAKE, size=-1), "data.dataset: the length of its 'train' split is not known"),
        (
            dataset(_target_="torch.utils.data.TensorDataset"),
            "data.dataset: the length of its 'train' split is not known",
        ),
        (dataset(_target_="torchvision.datasets.ImageFolder", root="/nowhere"), "data.dataset: "),
        (transforms("eval", "torch.nn.Conv2d", **CONV), "transform.eval: cannot take images of (1, 3, 8, 8)"),
        (transforms("train", "torch.nn.Conv2d", **CONV), "transform.train: cannot take images of (2, 3, 8, 8)"),
        (transforms("eval", "torchvision.transforms.ToTensor"), "transform.eval: cannot take images"),
        (
            transforms("sample_eval", "torch.nn.Conv2d", **CONV),
            "transform.sample_train, transform.sample_eval: cannot take",
        ),
        (lambda config: config["model"].update(hidden="x"), "from: odd.safetensors"),
        (lambda config: config["model"].update(hidden=[10**9]), "model.hidden.0: cannot be 1000000000, as it comes"),
        (lambda config: config["model"].update(hidden=[1] * 20_000), "model: has over 32,768 tensors"),
        (lambda config: config.update(devices=10**6), "devices: cannot be 1000000, as it comes from a file"),
    ]
    for number, (change, words) in enumerate(cases):
        config = yaml.safe_load(found["config"])
        change(config)
        write(Path("odd.safetensors"), found | {"config": yaml.safe_dump(config)})
        verb = ("train", "eval")[number % 2]
        result = rejected(verb, "ckpt_path=odd.safetensors", "threads=1", "log.progress=false", "log.curves=false")
        assert words in result.err


def test_a_run_sends_nothing_to_an_address_in_a_checkpoint_and_says_so(
    checkpoint: Path, workdir: Path, accepted: Any
) -> None:
    found, trackers = read(checkpoint), "runner.tracking.trackers.loggers"
    config = yaml.safe_load(found["config"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        config["logger"] = {
            "csv": {"_target_": "runner.tracking.loggers.Csv"},
            "mlflow": {"_target_": f"{trackers}.MLflow", "tracking_uri": address, "wait_s": 30},
            "other": {"_target_": f"{trackers}.MLflow", "tracking_uri": address, "wait_s": 30},
        }
        write(Path("odd.safetensors"), found | {"config": yaml.safe_dump(config)})
        result = accepted("train", "ckpt_path=odd.safetensors", "epochs=2", "log.progress=false", "log.curves=false")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert list(yaml.safe_load((result.directory / "config.yaml").read_text())["logger"]) == ["csv"]
    assert "logger.mlflow, logger.other: not taken from the checkpoint; logger= on the command line" in result.out
    assert "tracking_uri" not in result.out


@pytest.mark.parametrize("key", ["dry_run", "post_mortem"])
def test_what_a_command_does_is_not_taken_from_a_checkpoint(
    key: str, checkpoint: Path, workdir: Path, run: Any
) -> None:
    found = read(checkpoint)
    config = yaml.safe_load(found["config"])
    config[key] = True
    write(Path("odd.safetensors"), found | {"config": yaml.safe_dump(config)})
    result = run("train", "ckpt_path=odd.safetensors", "epochs=2", "log.progress=false", "log.curves=false")
    assert (result.status, result.summary["status"], result.summary["global_step"]) == (0, "finished", 8)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.int() for name, tensor in state.items()}


def test_tensors_of_another_kind_than_those_of_the_run_are_refused(train: Any, workdir: Path, rejected: Any) -> None:
    averaging = ("ema=0.9", "averaging.warmup=false", "logger=none", "log.progress=false", "log.curves=false")
    found = read(train(*SMALL, *averaging).directory / "checkpoints" / "last.safetensors")
    optimizer = copy.deepcopy(found["optimizer"])
    optimizer["state"][0]["exp_avg"] = optimizer["state"][0]["exp_avg"].long()
    cases = [
        ({"model": whole(found["model"])}, "4 of another kind (layers.0.weight torch.int32 for torch.float32"),
        ({"optimizer": optimizer}, "the optimizer's exp_avg is torch.int64, and its weight torch.float32"),
        ({"averaged": found["averaged"] | {"weights": whole(found["averaged"]["weights"])}}, "torch.float32"),
    ]
    for change, words in cases:
        write(Path("odd.safetensors"), found | change)
        for verb in ("train", *(() if "optimizer" in change else ("eval",))):
            which = [f"weights={'averaged' if 'averaged' in change else 'raw'}"] if verb == "eval" else []
            result = rejected(verb, "ckpt_path=odd.safetensors", *which)
            assert words in result.err
