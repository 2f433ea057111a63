"""Nothing in an untrusted file is executed: neither what is pickled in it nor its config."""

from __future__ import annotations

import copy
import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from faults import forging
from runner.checkpoint.file import DamagedCheckpoint, read, write

Make = Callable[..., dict[str, Any]]


def test_what_is_pickled_is_not_even_opened(tmp_path: Path) -> None:
    path, target = tmp_path / "bomb.pt", tmp_path / "ran"
    for new_format in (True, False):
        torch.save({"model": forging.Bomb(target)}, path, _use_new_zipfile_serialization=new_format)
        with pytest.raises(DamagedCheckpoint, match="is not a checkpoint of runner's; init_from= starts a run"):
            read(path)
        assert not target.exists(), "the file's code was run"
    torch.load(path, weights_only=False)
    assert target.exists(), "the bomb is a dud, and nothing was tested"


EVIL = ("os.system", "subprocess.run", "logging.os.system", "builtins.eval", "runner.run.directory.os.system",
        "torch.serialization.os.system", "pathlib.Path.touch", "torch.hub.load")  # fmt: skip
SMALL = (
    "data=synthetic", "data.dataset.samples=32", "data.image_size=8", "data.batch_size=8", "epochs=1",
    "model=mlp", "transform=none", "evaluate.test=false",
)  # fmt: skip


QUIET = ("threads=1", "log.progress=false", "log.curves=false")


@pytest.fixture
def checkpoint(train_once: Callable[..., Any]) -> Path:
    return train_once(*SMALL).directory / "checkpoints" / "last.safetensors"


@pytest.fixture
def altered(checkpoint: Path, workdir: Path) -> Callable[[Callable[[dict[str, Any]], object]], str]:
    """The override that names a copy of a checkpoint whose config has a change."""

    def make(change: Callable[[dict[str, Any]], object]) -> str:
        (workdir / "odd.safetensors").write_bytes(forging.with_config(read(checkpoint), change))
        return "ckpt_path=odd.safetensors"

    return make


def test_a_config_that_names_other_things_builds_none_of_them(altered: Any, workdir: Path, run: Any) -> None:
    target = workdir / "ran"

    def poison(config: dict[str, Any], place: str, evil: str) -> None:
        node = {"_target_": evil, "_args_": [f"touch {target}"]}
        if place in ("nested", "list"):
            config["model"]["hidden"] = [node] if place == "nested" else config["model"]["hidden"]
            config["transform"]["train"] = [node] if place == "list" else config["transform"]["train"]
        else:
            config[place] = node if place == "model" else {"x": node}

    unused = ("callbacks", "logger")  # by eval
    cases = [("model", evil) for evil in EVIL] + [(p, "os.system") for p in ("nested", "list", *unused)]
    for number, (place, evil) in enumerate(cases):
        word = altered(functools.partial(poison, place=place, evil=evil))
        for verb in ("train", "eval") if number in (0, 8) or place in unused else (("train", "eval")[number % 2],):
            result = run(verb, word, *QUIET)
            assert not target.exists(), f"{evil} was run"
            if verb == "eval" and place in unused:
                assert result.status == 0, (place, result.err)
                continue
            assert result.status == 2, (verb, place, evil, result.out)
            assert f"'{evil}'" in result.err
            assert "from a file" in result.err
            assert "Traceback" not in result.err


def test_the_refusal_says_how_to_trust_and_that_a_file_cannot_trust_itself(
    altered: Any, workdir: Path, run: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "untrusted.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nfrom runner.models.mlp import MLP\nclass Net(MLP): pass\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    word = altered(
        lambda config: config.update(model=config["model"] | {"_target_": "untrusted.Net"}, trust=["untrusted"])
    )
    words = ("eval", word, "split=val", "output=out", "threads=1")
    assert "trust=[untrusted]" in rejected(*words).err
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


HUGE = {"_target_": "torchvision.datasets.FakeData", "image_size": [3, 8, 8], "size": 10**12}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config["data"].update(dataset=HUGE), "data.dataset: its 'train' split has 1,000,000,000,000"),
        (lambda config: config["model"].update(hidden="x"), "from: odd.safetensors"),
        (lambda config: config["model"].update(hidden=[10**9]), "model.hidden.0: cannot be 1000000000, as it comes"),
        (lambda config: config["model"].update(hidden=[1] * 20_000), "model: has over 32,768 tensors"),
        (lambda config: config.update(devices=10**6), "devices: cannot be 1000000, as it comes from a file"),
    ],
    ids=range(5),
)
def test_a_config_that_asks_for_too_much_is_a_sentence_that_names_its_key(
    change: Any, words: str, altered: Any, rejected: Any
) -> None:
    assert words in rejected("train", altered(change), *QUIET).err


def test_a_run_sends_nothing_to_an_address_in_a_checkpoint_and_says_so(altered: Any, accepted: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        mlflow = {"_target_": "runner.tracking.trackers.loggers.MLflow", "tracking_uri": address, "wait_s": 30}
        loggers = {"csv": {"_target_": "runner.tracking.loggers.Csv"}, "mlflow": mlflow, "other": mlflow | {}}
        result = accepted("train", altered(lambda config: config.update(logger=loggers)), "epochs=2", *QUIET)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert list(yaml.safe_load((result.directory / "config.yaml").read_text())["logger"]) == ["csv"]
    assert "logger.mlflow, logger.other: not taken from the checkpoint; logger= on the command line" in result.out
    assert "tracking_uri" not in result.out


@pytest.mark.parametrize("key", ["dry_run", "post_mortem"])
def test_what_a_command_does_is_not_taken_from_a_checkpoint(key: str, altered: Any, run: Any) -> None:
    result = run("train", altered(lambda config: config.update({key: True})), "epochs=2", *QUIET)
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
