"""The malicious files of the section `hostile`: what each tries, and how the program is expected to end."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults.disk import pictures
from faults.forging import (
    Bomb,
    changed,
    forged,
    sealed_header,
    with_config,
    with_header,
)

REFUSED, HARMLESS = 2, 0
TARGETS = (
    "torch.nn.modules.module.functools.partial", "torch.serialization.os.system", "torch.hub.load", "torch.load",
    "torchvision.datasets.utils.download_url", "torchvision.datasets.LSUN", "torch.utils.cpp_extension.load_inline",
    "torch.fx.GraphModule", "functools.partial", "builtins.eval", "runner.tracking.loggers.Csv.open",
    "runner.checkpoint.file.write", "runner.models.torchvision_zoo.pickle.loads", "torch.nn.Module.load_state_dict",
)  # fmt: skip


@dataclass
class Arena:
    """What a case works with.

    Attributes:
        untrusted: folder of the file that was sent.
        outside: folder that nothing may be written to.
        canary: a file that no code may make.
        run: a run of ours, to be copied or harmed.
        contents: what its checkpoint holds.
    """

    untrusted: Path
    outside: Path
    canary: Path
    run: Path
    contents: dict[str, Any]

    def sent(self, data: bytes) -> list[str]:
        """Put a file there, and give the words that use it."""
        path = self.untrusted / "sent.safetensors"
        path.write_bytes(data)
        return [f"ckpt_path={path}"]


@dataclass
class Case:
    """A malicious file.

    Attributes:
        what: what it is.
        make: puts it there, and gives the words of the command line.
        train: exit status of resuming from it; None to leave that out.
        eval: exit status of evaluating it; None to leave that out.
    """

    what: str
    make: Callable[[Arena], list[str]]
    train: int | None = REFUSED
    eval: int | None = REFUSED


def _tar(arena: Arena) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Bomb(arena.canary), protocol=2)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _saved(arena: Arena, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": Bomb(arena.canary)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _as_weights(arena: Arena, data: bytes) -> list[str]:
    (arena.untrusted / "sent.pth").write_bytes(data)
    return [f"init_from={arena.untrusted / 'sent.pth'}"]


def _weights(zipped: bool) -> Callable[[Arena], list[str]]:
    return lambda arena: _as_weights(arena, _saved(arena, zipped))


def _naming(target: str) -> Callable[[Arena], list[str]]:
    def make(arena: Arena) -> list[str]:
        node = {"_target_": target, "_args_": [f"touch {arena.canary}"]}
        return arena.sent(with_config(arena.contents, lambda config: config.update(metrics={"evil": node})))

    return make


def _yaml(text: str) -> Callable[[Arena], list[str]]:
    return lambda arena: arena.sent(forged(arena.contents | {"config": text.replace("CANARY", str(arena.canary))}))


def _setting(value: Any, *place: str) -> Callable[[Arena], list[str]]:
    """A config with another value; OUTSIDE in it stands for the folder that nothing may be written to."""

    def make(arena: Arena) -> list[str]:
        def change(config: dict[str, Any]) -> None:
            inner = config
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value.replace("OUTSIDE", str(arena.outside)) if isinstance(value, str) else value

        return arena.sent(with_config(arena.contents, change))

    return make


def _holding(value: Any, *place: str) -> Callable[[Arena], list[str]]:
    """Another value at a place."""
    return lambda arena: arena.sent(changed(arena.contents, *place, value=value))


def _cached_elsewhere(arena: Arena) -> list[str]:
    """A config of other data, of which a cache would be made before anybody sees that the model does not fit."""
    pictures(arena.untrusted / "pictures")
    images = {
        "root": str(arena.untrusted / "pictures"), "image_size": 8, "cache": "disk",
        "cache_dir": str(arena.outside / "cache"), "dataset": {"_target_": "runner.data.sources.folders.image_folder"},
    }  # fmt: skip
    return arena.sent(with_config(arena.contents, lambda config: config["data"].update(images)))


def _moments(value: Any) -> Callable[[Arena], list[str]]:
    def make(arena: Arena) -> list[str]:
        state = dict(arena.contents["optimizer"]["state"])
        first = next(iter(state))
        state[first] = state[first] | {"exp_avg": value}
        return arena.sent(changed(arena.contents, "optimizer", "state", value=state))

    return make


def _headed(change: Callable[[dict[str, Any]], object], more: bytes = b"") -> Callable[[Arena], list[str]]:
    """A checkpoint whose header says something else."""
    return lambda arena: arena.sent(with_header(change, arena.contents, more))


def _first(header: dict[str, Any]) -> dict[str, Any]:
    """The first tensor of a header that has values."""
    return next(entry for name, entry in header.items() if name != "__metadata__" and entry["shape"])


def _saying(**texts: str) -> Callable[[Arena], list[str]]:
    """A checkpoint with other texts in its metadata."""
    return lambda arena: arena.sent(forged(arena.contents, **texts))


def _beside(name: str, *lines: str) -> Callable[[Arena], list[str]]:
    """A run directory of ours with something else in a file beside the checkpoint."""

    def make(arena: Arena) -> list[str]:
        (arena.run / name).write_text("\n".join(lines) + "\n")
        return [f"ckpt_path={arena.run}"]

    return make


def _linked(name: str) -> Callable[[Arena], list[str]]:
    """A run directory in which a name leads elsewhere, continued in its place."""

    def make(arena: Arena) -> list[str]:
        path = arena.run / name
        if path.is_dir():
            path.rename(arena.outside / "moved")
        path.unlink(missing_ok=True)
        path.symlink_to(arena.outside / ("moved" if name in ("plots", "checkpoints") else "precious.txt"))
        return [f"ckpt_path={arena.run}", f"hydra.run.dir={arena.run}"]

    return make


_NAMES = [
    "../../escape",
    "\x1b]0;title\x07\x1b[31mred",
    "new\nline",
    "x" * 10**6,
    "/absolute",
    "$(touch x)",
    "\u202egnp",
    "a,b",
    "",
    "\x9b31m",
]
_LAUGHS = "a: &a [1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(24)
)
_HEAD = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '"'
_LINE = '{"global_step": 1, "epoch": 1, "split": "train", "loss": '

CASES = [
    Case("a bare pickle", lambda arena: arena.sent(pickle.dumps(Bomb(arena.canary)))),
    Case("torch's format before zip, with code", lambda arena: arena.sent(_saved(arena, zipped=False))),
    Case("torch's tar format, with code", lambda arena: arena.sent(_tar(arena))),
    Case("torch.save with code", lambda arena: arena.sent(_saved(arena, zipped=True))),
    *(Case(f"weights of another program, {name} with code", _weights(zipped), REFUSED, None)
      for name, zipped in (("torch.save", True), ("torch's format before zip", False))),
    Case("weights of another program, a bare pickle", lambda arena: _as_weights(arena, pickle.dumps(Bomb(arena.canary))),
         REFUSED, None),
    Case("a header that claims 2**60 bytes", lambda arena: arena.sent(sealed_header(_HEAD.encode(), 2**60))),
    Case("a header that claims a byte more than there is", lambda arena: arena.sent(
        sealed_header((text := (_HEAD + "}}").encode()), len(text) + 1))),
    Case("a header of 5 MB of empty lists", lambda arena: arena.sent(
        sealed_header((_HEAD + '},"a":[' + "[]," * (5_000_000 // 3) + "0]}").encode()))),
    Case("a header with 100,000 levels", lambda arena: arena.sent(sealed_header((_HEAD + '},"a":' + "[" * 100_000).encode()))),
    Case("a header with one name twice", lambda arena: arena.sent(sealed_header((_HEAD + '},"a":1,"a":1}').encode()))),
    Case("tensors that overlap", _headed(lambda header: _first(header).update(data_offsets=[0, 8]))),
    Case("a tensor of 2**40 numbers", _headed(lambda header: _first(header).update(shape=[2**40]))),
    Case("a tensor of a negative size", _headed(lambda header: _first(header).update(shape=[-4, -1]))),
    Case("a tensor of another dtype", _headed(lambda header: _first(header).update(dtype="F16"))),
    Case("a tensor of a dtype that there is not", _headed(lambda header: _first(header).update(dtype="OBJECT"))),
    Case("a tensor of 10,000 dimensions", _headed(lambda header: _first(header).update(shape=[1] * 10_000))),
    Case("a tensor that ends behind the file", _headed(lambda header: header.update(
        x={"dtype": "U8", "shape": [2**50], "data_offsets": [0, 2**50]}))),
    Case("tensors that belong to nothing", _headed(
        lambda header: header.update({f"x{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(10**5)}))),
    Case("bytes after the last tensor", _headed(lambda header: None, b"x" * 100)),
    Case("metadata that are not texts", _headed(lambda header: header["__metadata__"].update(model={"a": 1}))),
    Case("a part of a kind that there is not", _saying(optimizer='{"$pickle":"cos\\nsystem"}')),
    Case("a part that names a tensor that there is not", _saying(optimizer='{"$tensor":"nowhere"}')),
    Case("a part with 100,000 levels", _saying(metrics="[" * 100_000)),
    Case("a part with 300 levels", _saying(metrics='{"callbacks":' + "[" * 300 + "]" * 300 + "}")),
    Case("a part that is a number of 5,000 digits", _saying(rng="9" * 5000)),
    Case("a mapping whose keys are lists", _saying(optimizer='{"$dict":[[[],1]]}')),
    Case("moments of another shape than their weight", _moments(torch.zeros(1)), REFUSED, HARMLESS),
    Case("a position beyond the epoch", _holding(10**6, "position", "batch"), REFUSED, HARMLESS),
    Case("a position with other fields", _holding(1, "position", "__init__"), REFUSED, HARMLESS),
    Case("a position of 400 bits", _holding(2**400, "position", "epoch")),
    Case("a best evaluation that is text", _holding({"metric": "x" * 9}, "metrics", "best")),
    Case("a generator's state of 2**70", _holding(["MT19937", [2**70] * 624, 0, 0, 0.0], "rng", "numpy"), REFUSED, HARMLESS),
    Case("callbacks and metrics with names of paths and escapes", _holding(
        {"../../x": {"a": 1}, "\x1b[2J": {}}, "metrics", "callbacks"), HARMLESS, HARMLESS),
    Case("class names that are all the same", _holding(["x"] * 10, "classes"), REFUSED, HARMLESS),
    Case("class names of paths, escapes, and a million letters", _holding(_NAMES, "classes"), REFUSED, HARMLESS),
    *(Case(f"a config that builds {target}", _naming(target)) for target in TARGETS),
    Case("a YAML tag", _yaml("!!python/object/apply:os.system ['touch CANARY']")),
    Case("a YAML tag inside", _yaml("model: !!python/object/new:os.system ['touch CANARY']")),
    Case("YAML aliases that stand for 2**25 values", _yaml(_LAUGHS)),
    Case("10,000 levels of YAML", _yaml("a: " + "[" * 10_000 + "]" * 10_000)),
    Case("a config of 5 million letters", _yaml("a: " + "x" * 5_000_000)),
    Case("a number of 4,000 digits", _yaml("seed: " + "9" * 4000)),
    Case("a number in base 60 of 50,000 digits", _yaml("seed: 1" + ":59" * 25_000)),
    Case("interpolations", _yaml("model: ${oc.env:HOME}")),
    Case("a name that climbs", _setting("../../../outside/x", "name")),
    Case("a name that is a path", _setting("OUTSIDE/x", "name")),
    Case("a name with a line end and escapes", _setting("a\n\x1b[2J", "name")),
    Case("output_root elsewhere", _setting("OUTSIDE", "output_root"), HARMLESS, HARMLESS),
    Case("ckpt_path in the config", _setting("/etc/passwd", "ckpt_path"), HARMLESS, HARMLESS),
    Case("a data set's name that climbs", _setting("../../../outside/x", "data", "name"), HARMLESS, HARMLESS),
    Case("a data set to be fetched into a folder elsewhere", _setting(
        {"_target_": "runner.data.sources.torchvision_sets.kmnist", "root": None, "download": True}, "data", "dataset")),
    Case("a cache of images in a folder elsewhere", _cached_elsewhere),
    Case("a million threads", _setting(10**6, "threads")),
    Case("a million worker processes", _setting(10**6, "data", "num_workers")),
    Case("a model of 2**40 weights", _setting(2**30, "model", "width")),
    Case("metrics.jsonl with 100,000 levels", _beside(
        "metrics.jsonl", "[" * 100_000, _LINE + "[" * 5000 + "]" * 5000 + "}"), HARMLESS, None),
    Case("metrics.jsonl with a line of 8 MiB and numbers of 400 digits", _beside(
        "metrics.jsonl", _LINE + "9" * 400 + "}", _LINE + "1e999}", "x" * 2**23), HARMLESS, None),
    Case("summary.json with 100,000 levels", _beside("summary.json", "[" * 100_000), HARMLESS, HARMLESS),
    *(Case(f"a run directory whose {name} is a link elsewhere", _linked(name), REFUSED, None)
      for name in (".lock", "run.log", "metrics.jsonl", "summary.json", "plots", "checkpoints")),
]  # fmt: skip
assert len({case.what for case in CASES}) == len(CASES), "each case has a name of its own"
