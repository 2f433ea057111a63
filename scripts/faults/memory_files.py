"""The files of the section `memory`: small on the disk, and made to become large when they are read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.forging import archive, forged, sealed_header

Contents = dict[str, Any]
LARGEST = 2**20  # bytes of each file


@dataclass
class Bomb:
    """A small file that wants to become a large one.

    Attributes:
        what: what it is.
        verb: `eval` for a checkpoint, `train` for anything else.
        make: writes it into a folder, and gives the words that read it. It is given the contents of a good checkpoint.
    """

    what: str
    verb: str
    make: Callable[[Path, Contents], list[str]]


def _global(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def _int(value: int) -> bytes:
    data = value.to_bytes(9, "little")
    return b"\x8a\x09" + data


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _call(name: str, *arguments: bytes) -> bytes:
    return _global(name) + b"(" + b"".join(arguments) + b"tR"


def _flood(prepared: bytes, once: bytes, room: int = LARGEST - 4096) -> bytes:
    """A list of as many copies of something as fit; what is prepared lies in the memo."""
    return prepared + b"](" + once * ((room - len(prepared)) // len(once)) + b"e"


def _many(count: int, item: Callable[[int], bytes]) -> bytes:
    return b"](" + b"".join(item(number) for number in range(count)) + b"e"


def _copies(name: str, made: bytes) -> bytes:
    """Copies of one large object: what is called lies at 0 of the memo, the object at 1."""
    return _flood(made + b"q\x01" + _global(name) + b"q\x00", b"h\x00h\x01\x85R")


_NUMBERS = _many(2**16, lambda number: b"M" + number.to_bytes(2, "little"))
_MAPPING = b"}(" + b"".join(b"M" + number.to_bytes(2, "little") + b"N" for number in range(2**16)) + b"u"


def _chain(codec: str, times: int) -> bytes:
    """Text that a codec makes longer, again and again."""
    made = _text("x" * 1000)
    for _ in range(times):
        made = _global("_codecs.encode") + made + _text(codec) + b"\x86R"
        made = made if codec == "hex" else _global("_codecs.encode") + made + _text("latin1") + b"\x86R"
    return made


def _storage(key: str, numbers: int, *more: bytes) -> bytes:
    parts = _text("storage") + _global("torch.FloatStorage") + _text(key) + _text("cpu") + _int(numbers)
    return b"(" + parts + b"".join(more) + b"tQ"


def _tensor(storage: bytes, *shape: int) -> bytes:
    size = b"(" + b"".join(map(_int, shape)) + b"t"
    stride = b"(" + b"K\x00" * len(shape) + b"t"
    return _call(
        "torch._utils._rebuild_tensor_v2", storage, b"K\x00", size, stride, b"\x89", b"ccollections\nOrderedDict\n)R"
    )


def _spelled() -> bytes:
    """One record under every spelling of its name, each of which would be read by itself."""
    names = [
        "".join(letter.upper() if number >> place & 1 else letter for place, letter in enumerate("abcdefghij"))
        for number in range(1024)
    ]
    return _many(1024, lambda number: _storage(names[number], 0))


_PICKLES: dict[str, bytes] = {
    "bytearray of a number": _call("builtins.bytearray", _int(3 * 2**30)),
    "codec hex, 22 times": _chain("hex", 22),
    "codec utf-32": _flood(
        _text("x" * 2**19) + b"q\x01" + _global("_codecs.encode") + b"q\x00" + _text("utf-32") + b"q\x02",
        b"h\x00h\x01h\x02\x86R",
    ),
    "codec latin1 of one text, many times": _flood(
        _text("x" * 2**19) + b"q\x01" + _global("_codecs.encode") + b"q\x00" + _text("latin1") + b"q\x02",
        b"h\x00h\x01h\x02\x86R",
    ),
    "copies of a set": _copies("builtins.set", _NUMBERS),
    "copies of a Counter": _copies("collections.Counter", _MAPPING),
    "copies of a Size": _copies("torch.Size", _NUMBERS[1:-1] + b"t"),
    "copies of a tensor": _copies("torch.FloatTensor", _NUMBERS),
    "copies of attributes": _flood(
        _MAPPING + b"q\x01" + b"ccollections\nOrderedDict\nq\x00", b"h\x00)Rh\x01b"
    ),
    "bytearray inside a rebuilt type": _call(
        "torch._tensor._rebuild_from_type_v2",
        _global("builtins.bytearray"), _global("torch.Tensor"), _int(3 * 2**30) + b"\x85", b"}",
    ),
    "an expanded tensor on another device": _call(
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        _tensor(_storage("0", 1), 2**30), _global("torch.float64"), _text("cpu"), b"\x89",
    ),
    "a quantized tensor of 2**40": _call(
        "torch._utils._rebuild_qtensor", _storage("0", 1), b"K\x00", b"(" + _int(2**40) + b"t", b"(K\x01t",
        b"(" + _global("torch.per_tensor_affine") + b"G?\xb9\x99\x99\x99\x99\x99\x9aK\x00t", b"\x89", b"N",
    ),
    "empty parameters": _flood(_global("torch.nn.parameter.Parameter") + b"q\x00", b"h\x00)\x81"),
    "empty tensors": _flood(_global("torch.Tensor") + b"q\x00", b"h\x00)R"),
    "empty sets": _flood(b"", b"\x8f"),
    "empty mappings": _flood(b"", b"}"),
    "marks": b"(" * (LARGEST - 4096) + b"t.",
    "tuples of tuples as a key": b"}" + b")" + b"\x85" * 900_000 + b"Ns",
    "entries of the memo": b"N" + b"".join(b"r" + number.to_bytes(4, "little") for number in range(200_000)),
    "one record under 1,024 names": _spelled(),
}  # fmt: skip
_RECORDS = {"archive/byteorder": b"little", "archive/version": b"3\n", "archive/data/0": b"\0" * 4}


def _archived(pickled: bytes, more: bytes = b"") -> dict[str, bytes]:
    data = {"archive/data/abcdefghij": b"\0" * 2**19} if b"abcdefghij" in pickled else {}
    return {"archive/data.pkl": b"\x80\x02" + pickled + more + b"."} | _RECORDS | data


def _unsealed(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _older(pickled: bytes) -> bytes:
    """A file of torch's older format: a magic number, a version, facts of the system, contents, keys of storages."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return (
        b"".join(pickle.dumps(each, protocol=2) for each in head) + b"\x80\x02" + pickled + b"." + pickle.dumps([], 2)
    )


def _sent(data: bytes, name: str = "sent.pt") -> Callable[[Path, Contents], list[str]]:
    def make(folder: Path, contents: Contents) -> list[str]:
        (folder / name).write_bytes(data)
        key = "ckpt_path" if b"runner-sha256:" in data[-100:] or b'"sha256":"' in data[:200] else "init_from"
        return [f"{key}={folder / name}"]

    return make


def _config(text: str) -> Callable[[Path, Contents], list[str]]:
    def make(folder: Path, contents: Contents) -> list[str]:
        return _sent(forged(contents | {"config": text}), "sent.safetensors")(folder, contents)

    return make


def _headed(text: str) -> Callable[[Path, Contents], list[str]]:
    """A checkpoint of nothing but a header."""
    head = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '"'
    return _sent(sealed_header((head + text).encode()), "sent.safetensors")


def _saying(**texts: str) -> Callable[[Path, Contents], list[str]]:
    """A checkpoint with other texts in its metadata."""
    return lambda folder, contents: _sent(forged(contents, **texts), "sent.safetensors")(folder, contents)


def _header(text: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


def _deflated(folder: Path, contents: Contents) -> list[str]:
    return _sent(_unsealed(_archived(b"}") | {"archive/data/0": b"\0" * 2**29}, zipfile.ZIP_DEFLATED))(folder, contents)


def _two_lists(folder: Path, contents: Contents) -> list[str]:
    """An archive that one reader finds harmless, and that holds another one's list of compressed records in its comment."""
    bomb = _unsealed(_archived(b"}") | {"archive/data/0": b"\0" * 2**28}, zipfile.ZIP_DEFLATED)
    return _sent(bomb[:4] + _unsealed(_archived(b"}"))[4:] + bomb[4:])(folder, contents)


def _images(folder: Path, contents: Contents) -> list[str]:
    """MNIST whose images are a compressed gigabyte."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        head = struct.pack(">4B3I", 0, 0, 8, 3, 2**20 - 20, 32, 32)
        with gzip.open(raw / f"{prefix}-images-idx3-ubyte.gz", "wb", compresslevel=9) as file:
            file.write(head)
            for _ in range(2**8):
                file.write(b"\0" * 2**21)
        with gzip.open(raw / f"{prefix}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4BI", 0, 0, 8, 1, 60000) + b"\0" * 60000)
    return ["data=mnist", f"data.root={folder}"]


def _laughing() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)])


BOMBS = [
    *(Bomb(f"checkpoint: {what}", "eval", _sent(archive(_archived(made)))) for what, made in _PICKLES.items()),
    *(Bomb(f"weights: {what}", "train", _sent(_unsealed(_archived(made)))) for what, made in _PICKLES.items()),
    *(Bomb(f"weights of the older format: {what}", "train", _sent(_older(made))) for what, made in _PICKLES.items()),
    Bomb("weights: a bare pickle of 32 bytes", "train", _sent(_call("builtins.bytearray", _int(3 * 2**30)) + b".")),
    Bomb("weights: a storage that claims 8 GiB", "train", _sent(_older(
        b"}" + _text("x") + _tensor(_storage("0", 2**31, b"N"), 1) + b"s"))),
    Bomb("weights: a compressed archive", "train", _deflated),
    Bomb("weights: an archive inside an archive", "train", _two_lists),
    Bomb("weights: safetensors of 20,000 empty tensors", "train", _sent(_header(json.dumps(
        {f"{n:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(16_000)}).encode()),
        "sent.safetensors")),
    Bomb("weights: safetensors whose header claims 2**60 bytes", "train", _sent(_header(b"{}", 2**60), "sent.safetensors")),
    Bomb("weights: safetensors of a tensor of 2**40", "train", _sent(_header(json.dumps(
        {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()), "sent.safetensors")),
    Bomb("weights: safetensors with 100,000 levels", "train", _sent(_header(b'{"a":' + b"[" * 100_000), "sent.safetensors")),
    Bomb("checkpoint: a header of 340,000 empty lists", "eval", _headed('},"a":[' + "[]," * 335_000 + "0]}")),
    Bomb("checkpoint: a header of 140,000 mappings", "eval", _headed('},"a":[' + '{"":1},' * 135_000 + "0]}")),
    Bomb("checkpoint: a header of 12,000 empty tensors", "eval", _headed("}," + json.dumps(
        {f"{n:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(12_000)})[1:])),
    Bomb("checkpoint: a part of 300,000 empty mappings", "eval", _saying(metrics="[" + "{}," * 300_000 + "0]")),
    Bomb("checkpoint: a part of 70,000 sets", "eval", _saying(rng="[" + '{"$set":[]},' * 70_000 + "0]")),
    Bomb("checkpoint: a part that has one tensor 35,000 times", "eval", _saying(
        rng="[" + '{"$tensor":"rng/torch"},' * 35_000 + "0]")),
    Bomb("config: YAML of 130,000 numbers", "eval", _config("a: [" + "1," * 130_000 + "]")),
    Bomb("config: YAML of 65,000 mappings", "eval", _config("a: [" + "{}," * 65_000 + "]")),
    Bomb("config: YAML of 30,000 keys", "eval", _config("a: {" + "".join(f"k{n:x}: 1, " for n in range(26_000)) + "}")),
    Bomb("config: YAML aliases", "eval", _config(_laughing())),
    Bomb("config: 100,000 levels of YAML", "eval", _config("a: " + "[" * 100_000)),
    Bomb("config: text of 900,000 letters", "eval", _config("a: " + "x" * 900_000)),
    Bomb("data: images compressed to a thousandth", "train", _images),
]  # fmt: skip
assert len({bomb.what for bomb in BOMBS}) == len(BOMBS), "each file has a name of its own"
