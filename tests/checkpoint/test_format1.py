"""Checkpoints of format 1, as written before this version: each still resumes to the recorded bits, and evaluates.

tests/data/format1/<kind>.pt and expected.json were made on one machine by the last version that wrote format 1. Results
of training depend on torch's version and the CPU's instructions, the contents of a file on neither.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner.checkpoint import file, find
from runner.checkpoint.manager import CheckpointManager
from runner.checkpoint.weights import read_weights, weights_sha256

Make = Callable[..., dict[str, Any]]
Forge = Callable[[Path, Any], None]
FORMAT_1 = Path(__file__).resolve().parents[1] / "data" / "format1"
EXPECTED = json.loads((FORMAT_1 / "expected.json").read_text())
KINDS = EXPECTED["kinds"]
HERE = {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
RECORDED = {key: EXPECTED["versions"][key] for key in HERE}


@pytest.fixture
def evaluate(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What `eval` says of a kind's checkpoint, without a picture of it."""
    monkeypatch.setattr("runner.tracking.plots.confusion_matrix", lambda *_: None)

    def call(kind: str, weights: str) -> dict[str, Any]:
        result = run("eval", f"ckpt_path={FORMAT_1 / kind}.pt", f"weights={weights}", "json=true", "output=evaluated")
        assert result.status == 0, result.err
        return json.loads(result.out)

    return call


def test_there_is_a_file_for_every_kind() -> None:
    assert {path.stem for path in FORMAT_1.glob("*.pt")} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_and_ends_with_the_recorded_weights(run: Callable[..., Any], kind: str) -> None:
    expected = KINDS[kind]
    result = run("train", f"ckpt_path={FORMAT_1 / kind}.pt", *expected["resume"])
    assert result.status == 0, result.err
    assert f"at step {expected['steps_at_save']}" in result.out + result.err
    summary = result.summary
    assert summary["status"] == expected["final_status"]
    if HERE != RECORDED:
        # Where a run stops may follow from rounding, as for early stopping, so it is compared only below.
        pytest.skip(f"bits were recorded with {RECORDED}, and this is {HERE}")
    assert summary["global_step"] == expected["final_steps"]
    assert summary["weights_sha256"] == expected["final_weights_sha256"]
    assert summary["test"] == expected["final_test"]


@pytest.mark.parametrize(
    ("kind", "weights"), [(kind, weights) for kind in KINDS for weights in (*KINDS[kind]["eval_of"], "auto")]
)
def test_evaluates_with_the_recorded_metrics(evaluate: Callable[..., dict[str, Any]], kind: str, weights: str) -> None:
    expected = KINDS[kind]["eval"] if weights == "auto" else KINDS[kind]["eval_of"][weights]
    found = evaluate(kind, weights)
    # What is in the file is the same everywhere, and so are the digests of the restored weights.
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["global_step"] == KINDS[kind]["steps_at_save"]
    if weights == "raw":
        assert found["weights_sha256"] == KINDS[kind]["weights_sha256_at_save"]
    same = expected["metrics"] if HERE == RECORDED else pytest.approx(expected["metrics"], rel=1e-3, abs=0.01)
    assert found["metrics"] == same


def test_init_from_takes_the_weights(tmp_path: Path) -> None:
    found = read_weights(str(FORMAT_1 / "adamw_cosine.pt"), tmp_path)
    assert weights_sha256(found.tensors) == KINDS["adamw_cosine"]["weights_sha256_at_save"]
    assert found.classes


@pytest.mark.parametrize(
    "words", [("export", "format=safetensors"), ("predict", "input=val", "output=rows.csv")], ids=str
)
def test_the_other_verbs_read_it(run: Callable[..., Any], words: tuple[str, ...]) -> None:
    output = () if words[0] == "predict" else ("output=exported",)
    result = run(*words, *output, f"ckpt_path={FORMAT_1 / 'adamw_cosine.pt'}", "threads=1")
    assert result.status == 0, result.err


def test_the_same_state_in_both_formats_is_no_difference(run: Callable[..., Any], workdir: Path) -> None:
    file.write(workdir / "new.safetensors", file.read(FORMAT_1 / "ema.pt"))
    result = run("audit", f"a={FORMAT_1 / 'ema.pt'}", "b=new.safetensors")
    assert result.status == 0, result.out


def run_of_format_1(workdir: Path) -> Path:
    """A run directory as the version before left it: last, best, and the files of two steps."""
    folder = workdir / "old" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("last", "best", "step_0000000007"):
        shutil.copy(FORMAT_1 / "adamw_cosine.pt", folder / f"{name}.pt")
    shutil.copy(FORMAT_1 / "accumulate.pt", folder / "step_0000000004.pt")
    return folder


def test_a_run_that_goes_on_in_its_directory_writes_the_new_format_and_drops_the_old(
    run: Callable[..., Any], workdir: Path
) -> None:
    folder, expected = run_of_format_1(workdir), KINDS["adamw_cosine"]
    result = run("train", "ckpt_path=old", "hydra.run.dir=old", *expected["resume"], "checkpoint.min_seconds=0")
    assert result.status == 0, result.err
    names = sorted(path.name for path in folder.iterdir())
    assert not [name for name in names if name.endswith(".pt")]
    assert {"last.safetensors", "best.safetensors", "step_0000000015.safetensors"} <= set(names)
    if HERE == RECORDED:
        assert result.summary["weights_sha256"] == expected["final_weights_sha256"]
    model = file.read(folder / "last.safetensors")["model"]
    assert weights_sha256(model) == result.summary["weights_sha256"]
    assert weights_sha256({name: load_file(folder / "last.safetensors")[name] for name in model}) == weights_sha256(
        model
    )


def test_names_are_moved_to_the_new_format_before_the_old_file_goes(workdir: Path, contents: Make) -> None:
    folder = run_of_format_1(workdir)
    manager = CheckpointManager(folder, 2)
    manager.make_last(folder / "last.pt")
    assert not (folder / "last.pt").exists()
    assert file.read(manager.last)["position"]["global_step"] == 7
    assert find.load(str(folder), workdir, "best").path.name == "best.pt"
    manager.save(contents(9), 9, is_best=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors", "last.safetensors", "step_0000000007.pt", "step_0000000009.safetensors",
    ]  # fmt: skip


def test_an_older_file_of_a_run_is_taken_where_the_newer_ones_are_damaged(workdir: Path, contents: Make) -> None:
    folder = run_of_format_1(workdir)
    CheckpointManager(folder, 3).save(contents(9), 9, is_best=False)
    assert find.load(str(folder), workdir, "last").path.name == "last.safetensors"
    for path in folder.glob("*.safetensors"):
        path.unlink()
        path.write_bytes(b"damaged")
    found = find.load(str(folder), workdir, "last")
    assert (found.path.name, found.contents["position"]["global_step"]) == ("step_0000000007.pt", 7)
    assert len(found.warnings) == 2


def test_every_flipped_byte_and_truncation_of_it_is_found(tmp_path: Path) -> None:
    data, path = (FORMAT_1 / "adamw_cosine.pt").read_bytes(), tmp_path / "damaged.pt"
    for place in [*range(8), *range(8, len(data), 401), *range(len(data) - 85, len(data))]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(file.DamagedCheckpoint, match=r"damaged\.pt: "):
            file.read(path)
        path.write_bytes(data[:place])
        with pytest.raises(file.DamagedCheckpoint, match=r"damaged\.pt: "):
            file.read(path)


@pytest.mark.parametrize("change", [{"sharded": True}, {"model": None}, {"position": "elsewhere"}], ids=str)
def test_an_archive_of_a_newer_format_is_no_damage(
    change: dict[str, Any], tmp_path: Path, contents: Make, forge: Forge
) -> None:
    forge(tmp_path / "new.pt", contents(format=file.FORMAT + 1) | change)
    with pytest.raises(file.UserError, match=r"new\.pt: has format 3, and this version reads up to 2") as caught:
        file.read(tmp_path / "new.pt")
    assert not isinstance(caught.value, file.DamagedCheckpoint)
