"""A checkpoint is one file that verifies itself: whole or not there, and never believed when it is damaged."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nested import equal, names
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from faults import forging
from runner.base.errors import UserError
from runner.checkpoint import layout
from runner.checkpoint.file import KEYS, DamagedCheckpoint, is_checkpoint, link, read, verify, write, wrong_type
from runner.checkpoint.weights import weights_sha256
from runner.distributed.sharding import loaded

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def sample(tmp_path: Path, contents: Make) -> Path:
    path = tmp_path / "sample.safetensors"
    write(path, contents())
    return path


def test_what_is_written_is_read_back(tmp_path: Path, contents: Make) -> None:
    made = contents(3, scaler={"scale": 2.0}, classes=[])
    made["model"] |= {
        "half": torch.randn(2, 2).to(torch.bfloat16), "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", made)
        assert equal(read(tmp_path / f"{name}.safetensors"), made)
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_safetensors_alone_gives_the_weights_under_their_own_names(sample: Path, contents: Make) -> None:
    loaded, weights = load_file(sample), contents()["model"]
    assert sorted(loaded) == sorted([*weights, "optimizer/state/0/step", "rng/torch"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_everything_else_is_text_in_the_metadata(sample: Path, contents: Make) -> None:
    with safe_open(sample, "pt") as opened:
        metadata = opened.metadata()
    assert set(metadata) == {*KEYS, "sha256", "digests"}
    assert (metadata["format"], metadata["config"]) == ("2", contents()["config"])
    assert json.loads(metadata["classes"]) == contents()["classes"]
    assert json.loads(metadata["position"]) == contents()["position"]
    assert json.loads(metadata["model"])["layer.weight"] == {"$tensor": "layer.weight"}


def test_the_checksums_are_as_documented(sample: Path) -> None:
    data = sample.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    blank = data[:end].replace(metadata["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == metadata["sha256"]
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    digests = {name: hashlib.sha256(data[end + a : end + b]).hexdigest() for name, (a, b) in places.items()}
    assert digests == json.loads(metadata["digests"])
    assert end % 8 == 0, "tensors are aligned"


def test_a_state_comes_back_with_its_exact_values_and_types(tmp_path: Path, contents: Make) -> None:
    state = {
        0: (1, 2.5, None, True, 2**70, -0.0, 1e-320, 0.1 + 0.2),
        "odd": [float("nan"), float("inf"), float("-inf"), 1j, complex("nan"), b"ab", bytearray(b"x"), "\ud800\0"],
        (1, "a"): {"$tensor": "no tensor", "": {1, 2}, "facts": (torch.Size([1, 2]), torch.float16, torch.device("cuda:1"))},
        None: [OrderedDict(b=1, a=2), Counter("aab"), (), [], {}, set()],
    }  # fmt: skip
    made = contents()
    made["metrics"]["callbacks"] = {"mine": state}
    write(tmp_path / "a.safetensors", made)
    found = read(tmp_path / "a.safetensors")["metrics"]["callbacks"]["mine"]
    assert repr(found) == repr(state)  # NaN is not equal to itself
    assert [type(item) for item in found[None]] == [type(item) for item in state[None]]


KINDS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32,
    torch.float32, torch.int64, torch.uint64, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def test_tensors_of_every_dtype_and_shape_come_back_with_the_same_bytes(tmp_path: Path, contents: Make) -> None:
    drawn = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    model = {str(kind): drawn.view(kind) for kind in KINDS}
    model |= {f"one {kind}": torch.ones((), dtype=kind) for kind in KINDS}
    model |= {f"none {kind}": torch.ones((2, 0), dtype=kind) for kind in KINDS}
    model |= {"strided": torch.randn(3, 4).t(), "expanded": torch.ones(1).expand(5), "__metadata__": torch.ones(2)}
    write(tmp_path / "a.safetensors", contents(model=model))
    found = read(tmp_path / "a.safetensors")["model"]
    assert weights_sha256(found) == weights_sha256(model)
    assert list(found) == list(model)
    assert len(load_file(tmp_path / "a.safetensors")) == len(model) + 2


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path, contents: Make) -> None:
    weight = torch.randn(50, 20)
    model = {"embedding.weight": weight, "decoder.weight": weight, "view": weight[:25]}
    averaged = {"kind": "ema", "updates": 1, "calibrated": True, "weights": {"decoder.weight": weight}}
    write(tmp_path / "a.safetensors", contents(model=model, averaged=averaged))
    found = read(tmp_path / "a.safetensors")
    assert found["model"]["decoder.weight"] is found["model"]["embedding.weight"]
    assert found["averaged"]["weights"]["decoder.weight"] is found["model"]["embedding.weight"]
    assert equal(found["model"], model)
    assert {"embedding.weight", "view"} == {name for name in load_file(tmp_path / "a.safetensors") if "/" not in name}


def test_a_models_own_tensor_keeps_its_name_whatever_others_are_called(tmp_path: Path, contents: Make) -> None:
    model = {"optimizer/state/0/step": torch.zeros(3), "rng/torch": torch.ones(1)}
    made = contents(model=model)
    write(tmp_path / "a.safetensors", made)
    assert equal(read(tmp_path / "a.safetensors"), made)
    loaded = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


def test_only_the_parts_that_are_needed_are_read_and_verified(sample: Path, contents: Make) -> None:
    data = bytearray(sample.read_bytes())
    data[-1] ^= 1  # of rng/torch
    sample.write_bytes(data)
    found = read(sample, lambda known: ["model"] if known["classes"] else KEYS)
    assert equal(found["model"], contents()["model"])
    assert found["optimizer"]["state"][0]["step"].device.type == "meta"
    for look in (verify, read):
        with pytest.raises(DamagedCheckpoint, match=r"do not match its checksum \(rng/torch\)"):
            look(sample)


def test_other_safetensors_files_are_told_from_checkpoints(sample: Path, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    assert is_checkpoint(sample)
    assert not is_checkpoint(tmp_path / "other.safetensors")
    data = bytearray(sample.read_bytes())
    for place in (20, 40, 50):
        data[place] ^= 1
        sample.write_bytes(data)
        assert is_checkpoint(sample), "a damaged checkpoint is not a file of weights"
        data[place] ^= 1


def test_every_truncation_and_every_flipped_byte_is_found_and_named(sample: Path) -> None:
    data, generator = sample.read_bytes(), random.Random(0)
    for length in {*range(0, len(data), len(data) // 60), 1, *(len(data) - left for left in (1, 64, 78, 80))}:
        sample.write_bytes(data[:length])
        for look in (verify, read):
            with pytest.raises(DamagedCheckpoint, match=r"sample\.safetensors: (is truncated|is not a checkpoint)"):
                look(sample)
    places = {generator.randrange(len(data)) for _ in range(200)} | set(range(8, 140))
    flips = [(place, generator.randrange(8)) for place in places]
    # The first bytes claim the length of the header.
    for place, bit in [*flips, *itertools.product(range(8), range(8))]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        sample.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=r"sample\.safetensors: "):
            read(sample)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.safetensors", tmp_path):
        with pytest.raises(UserError, match=f"checkpoint: cannot read {path}: "):
            read(path)


@pytest.mark.parametrize(
    ("target", "number", "reason"),
    [
        ("runner.checkpoint.layout._write_tensor", errno.ENOSPC, "no space left on the disk"),
        ("runner.checkpoint.layout._write_tensor", errno.EFBIG, r"cannot write .*\(ulimit -f"),
        ("pathlib.Path.open", errno.EACCES, r"cannot write .*: permission denied"),
        ("os.fsync", errno.EIO, "cannot write .*: input/output error"),
        ("os.replace", errno.EIO, "cannot write .*: input/output error"),
    ],
)
def test_a_failure_at_any_moment_leaves_the_old_file_and_nothing_else(
    target: str, number: int, reason: str, sample: Path, contents: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sample.read_bytes()
    monkeypatch.setattr(target, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=f"checkpoint: {reason}.*; earlier checkpoints are untouched"):
        write(sample, contents(8))
    monkeypatch.undo()
    assert sample.read_bytes() == before
    assert names(sample.parent) == ["sample.safetensors"]


def test_a_link_is_the_same_checkpoint_and_can_be_made_twice(tmp_path: Path, sample: Path, contents: Make) -> None:
    for _ in range(2):
        link(sample, tmp_path / "last.safetensors")
        assert equal(read(tmp_path / "last.safetensors"), read(sample))
    assert names(tmp_path) == ["last.safetensors", "sample.safetensors"]
    write(tmp_path / "other.safetensors", contents(9))
    link(tmp_path / "other.safetensors", tmp_path / "last.safetensors")
    assert read(tmp_path / "last.safetensors")["position"]["global_step"] == 9
    assert read(sample)["position"]["global_step"] == 7


def test_where_the_file_system_has_no_links_a_copy_is_made(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    link(sample, tmp_path / "last.safetensors")
    assert (tmp_path / "last.safetensors").read_bytes() == sample.read_bytes()
    assert (tmp_path / "last.safetensors").stat().st_ino != sample.stat().st_ino
    assert names(tmp_path) == ["last.safetensors", "sample.safetensors"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"x": torch.eye(2).to_sparse()}}, "x is a tensor that is sparse, quantized or without values"),
        ({"model": {"x": torch.zeros(2, device="meta")}}, "x is a tensor that is sparse, quantized or without values"),
        ({"config": 3}, "config is a int"),
        ({"config": "\ud800"}, ".*surrogates"),
        ({"metrics": {"callbacks": {"mine": {"seen": [object()]}}}}, "metrics/callbacks/mine/seen/0 is a object"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(
    change: dict[str, Any], reason: str, tmp_path: Path, contents: Make
) -> None:
    with pytest.raises(UserError, match=f"checkpoint: {reason}"):
        write(tmp_path / "a.safetensors", contents(**change))
    assert names(tmp_path) == []


@pytest.mark.parametrize("metadata", [{}, {"shards": "3"}, {"model": "{"}, {"digests": "{}"}], ids=str)
def test_a_newer_format_with_other_contents_is_no_damage(
    metadata: dict[str, str], tmp_path: Path, forge_header: Any
) -> None:
    path = tmp_path / "new.safetensors"
    forge_header(path, {"format": "3"} | metadata, {})
    with pytest.raises(UserError, match=r"new\.safetensors: has format 3, and this version reads up to 2") as caught:
        read(path)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize("written", ["0", "1", "-1", "2.0", "x"])
def test_a_format_before_this_one_or_none_at_all_is_refused(written: str, tmp_path: Path, forge_header: Any) -> None:
    forge_header(tmp_path / "odd.safetensors", {"format": written}, {})
    with pytest.raises(DamagedCheckpoint, match=r"is not a checkpoint of runner's: .*; init_from= starts a run"):
        read(tmp_path / "odd.safetensors")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("optimizer", '{"$pickle":"x"}'), ("optimizer", '{"$tensor":"nowhere"}'), ("optimizer", '{"$tensor":[1]}'),
        ("optimizer", '{"$tensor":["layer.weight","float31"]}'), ("optimizer", '{"$tuple":5}'), ("rng", '{"$set":[[]]}'),
        ("optimizer", '{"$dtype":"os"}'), ("optimizer", '{"$device":"elsewhere"}'), ("rng", '{"$tuple":[],"$set":[]}'),
        ("optimizer", '{"$dict":[[[],1]]}'), ("optimizer", '{"$Size":[1e400]}'), ("optimizer", '{"$bytes":"xyz"}'),
        ("metrics", '{"callbacks":' + nested(300) + "}"), ("metrics", nested(100_000)), ("classes", "9" * 5000),
        ("scheduler", ""), ("model", '{"a":{"$tensor":["layer.weight","int64"]}}'),
    ],
)  # fmt: skip
def test_a_structure_that_is_none_of_ours_is_refused(key: str, text: str, sample: Path, contents: Make) -> None:
    sample.write_bytes(forging.forged(contents(), **{key: text}))
    with pytest.raises(DamagedCheckpoint, match=r"sample\.safetensors: ") as caught:
        read(sample)
    assert len(str(caught.value)) < 1000


def test_large_tensors_stay_in_the_file_until_they_are_needed(tmp_path: Path, contents: Make) -> None:
    path, made = tmp_path / "large.safetensors", contents()
    made["model"]["large"] = torch.randn(600, 600)
    write(path, made)
    left_out, whole = read(path, later=True), read(path)
    left = [name for name, tensor in left_out["model"].items() if tensor.is_meta]
    assert left == ["large"]
    assert all(torch.equal(loaded(tensor), whole["model"][name]) for name, tensor in left_out["model"].items())
    with path.open("r+b") as opened:  # altered after it was verified
        header = layout.read_header(opened)
        opened.seek(header.tensors[left[0]].begin)
        opened.write(b"other")
    with pytest.raises(DamagedCheckpoint):
        loaded(left_out["model"][left[0]])
    with pytest.raises(DamagedCheckpoint):
        read(path, later=True)


AVERAGE = {"kind": "swa", "updates": 1, "weights": None, "calibrated": True}
AVERAGES = [
    ("", []), (".updates", {"kind": "ema"}), (".calibrated", {"kind": "ema", "updates": 1, "weights": None}),
    (".weights", {"kind": "ema", "updates": 1, "calibrated": True}), (".kind", AVERAGE | {"kind": "other"}),
    (".updates", AVERAGE | {"updates": -1}), (".updates", AVERAGE | {"updates": 1.5}),
    (".calibrated", AVERAGE | {"calibrated": 1}), (".weights", AVERAGE | {"weights": {"layer.weight": "text"}}),
    (".weights", AVERAGE | {"weights": [torch.zeros(1)]}), (".loss", AVERAGE | {"loss": {"scale": 1.0}}),
]  # fmt: skip
FINGERPRINTS = [
    3, {"train": 3}, {"train": {"samples": "9", "content": "a"}}, {1: {"samples": 9, "content": "a"}},
    {"train": {"samples": 9, "content": None}},
]  # fmt: skip


def test_contents_of_a_run_are_what_they_should_be(contents: Make) -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 1, "loss": 0.5, "global_step": 3, "epoch": 1}
    made = contents(scaler={"scale": 65536.0, "growth_interval": 2000})
    made["metrics"] |= {"best": best}
    made["averaged"] = AVERAGE | {"weights": made["model"]}
    made["model"]["head._extra_state"] = {"anything": 1}
    assert wrong_type(made) == ""


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("position", "epoch"), 2**60, "position.epoch"),
        (("position", "batch"), True, "position.batch"),
        (("position", "evaluation_due"), 1, "position.evaluation_due"),
        (("position", "turns"), [[5, 1], [5, 2]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), [[5, "1"]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), 5, "position.turns is not a list of steps and epochs, in order"),
        (("metrics", "best"), {"metric": "x"}, "metrics.best.mode"),
        (("metrics", "best"), [], "metrics.best is not a mapping"),
        (("metrics", "last"), {"loss": "low"}, "metrics.last is not numbers by name"),
        (("metrics", "images"), [3, 8], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 8, 8.0], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 2**20, 2**20], "metrics.images is not channels, height and width"),
        (("scaler",), {"scale": None}, "scaler is not numbers by name"),
        (("model", "layer.weight"), [1.0], "model is not tensors by name"),
        (("versions",), {1: "2"}, "versions is not a mapping by name"),
        (("position",), 5, "position is not a mapping"),
        (("position",), {"epoch": 0, "batch": -1, "global_step": 0}, "position.batch"),
        (("classes",), None, "classes is not a list of names"),
        (("model",), None, "model is not tensors by name"),
        (("optimizer",), None, "optimizer is not a mapping"),
        (("scheduler",), 4, "scheduler is not a mapping"),
        (("rng",), [], "rng is not a mapping"),
        (("metrics",), {}, "metrics.callbacks is not a mapping"),
        *((("metrics", "data"), value, "metrics.data is not samples and content of splits") for value in FINGERPRINTS),
        *((("averaged",), value, f"averaged{of} is not ") for of, value in AVERAGES),
    ],
    ids=str,
)
def test_values_of_another_type_are_named(place: tuple[str, ...], value: Any, words: str, contents: Make) -> None:
    made = contents()
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    assert words in wrong_type(made)


def test_a_file_with_such_a_value_is_refused(tmp_path: Path, contents: Make) -> None:
    write(tmp_path / "odd.safetensors", contents(position={}))
    with pytest.raises(DamagedCheckpoint, match=r"odd.safetensors: is not a checkpoint of runner's: position.epoch"):
        read(tmp_path / "odd.safetensors")
