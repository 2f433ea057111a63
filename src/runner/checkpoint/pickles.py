"""Files of `torch.save`, read without running anything in them: tensors and plain containers only.

`torch.load(weights_only=True)` may turn a few bytes into gigabytes (`bytearray(n)`, codecs, copies of containers), and its
reader of archives can be made to find other records than Python's. Here each name in a pickle stands for a function below,
not for what it would import, and the memory of all values is counted.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor

_FACTOR = 32  # bytes of memory for each byte of the file; what runs save takes up to 10
_FACTOR_PICKLED = 128  # bytes of memory for each byte of a pickle; what runs save takes about 50
_ROOM = 2**23  # bytes of memory that even the smallest pickle may take
_TENSOR = 1200  # bytes of a tensor without its values, in Python and C++
_OPCODE = 80  # bytes of an empty container, an entry in the memo, or half an entry in a mapping
_EXPANDED = 2**26  # bytes that a tensor may have beyond the file: a single number, say, repeated by a stride of 0
_DEEPEST = 64  # containers inside each other
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
_KEYS = (str, int, float, complex, bytes, type(None), torch.dtype)
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STORAGES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Int": torch.int32,
    "Long": torch.int64, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": torch.uint8,
}  # fmt: skip


class NotSaved(Exception):
    """The file is not as `torch.save` writes them."""


def is_archive(file: BinaryIO) -> bool:
    """Whether a file begins as a zip archive does."""
    file.seek(0)
    return file.read(4) == b"PK\3\4"


def load(file: BinaryIO, older: bool = False) -> Any:
    """Read what `torch.save` wrote; tensors are on the CPU, their attributes and `requires_grad` are dropped.

    Args:
        file: open for reading.
        older: whether it may be of the format that torch wrote before version 1.6, which is not an archive.

    Raises:
        NotSaved: if it is not as `torch.save` writes files.
        UnpicklingError: if it holds more than tensors and plain containers, or takes far more memory than it has bytes.
        Exception: of any kind, if it is damaged or made by hand.
    """
    size = file.seek(0, os.SEEK_END)
    if is_archive(file):
        return _load_archive(file, size)
    if not older:
        raise NotSaved("it is not a zip archive that can be read")
    return _load_older(file, size)


def _load_archive(file: BinaryIO, size: int) -> Any:
    records = _records(file, size)
    folders = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")]
    if len(folders) != 1 or not all(name.startswith(folders[0]) for name in records):
        raise NotSaved("its archive is not one folder with a data.pkl")

    def read(name: str, length: int | None = None) -> Tensor:
        record = records[folders[0] + name]
        # Not by `ZipFile.read`, which compares a CRC that `torch.save` may skip.
        file.seek(record.header_offset + 26)
        skipped = sum(int.from_bytes(file.read(2), "little") for _ in ("name", "extra field"))
        file.seek(skipped, os.SEEK_CUR)
        return _filled(file, record.file_size if length is None else length)

    if folders[0] + "byteorder" in records and bytes(read("byteorder").numpy().data) != b"little":
        raise NotSaved("it was written on a big-endian machine")
    pickled = io.BytesIO(read("data.pkl").numpy().data)
    return _Unpickler(pickled, size, len(pickled.getbuffer()), lambda key, length: read(f"data/{key}", length)).load()


def _records(file: BinaryIO, size: int) -> dict[str, zipfile.ZipInfo]:
    """The records of an archive by name; none is compressed, so a small file cannot stand for gigabytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise NotSaved(f"it is not a zip archive that can be read ({error})") from error
    if len({record.filename.lower() for record in records}) != len(records):
        raise NotSaved("its archive has two records with the same name")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise NotSaved("its archive is compressed, which torch.save never does")
    if sum(record.file_size for record in records) > size:
        raise NotSaved("its archive claims to hold more bytes than the file has")
    return {record.filename: record for record in records}


def _filled(file: BinaryIO, length: int) -> Tensor:
    data = torch.empty(length, dtype=torch.uint8)
    if file.readinto(data.numpy().data) != length:  # type: ignore[attr-defined]
        raise NotSaved("it is truncated")
    return data


def _load_older(file: BinaryIO, size: int) -> Any:
    """A file of five pickles (magic number, version, facts of the system, contents, keys of storages) and the storages."""
    storages: dict[str, Tensor] = {}

    def storage(key: str, length: int) -> Tensor:
        storages[key] = torch.empty(length, dtype=torch.uint8)
        return storages[key]

    file.seek(0)
    pickles = _Unpickler(file, size, size, storage)
    if (pickles.load(), pickles.load()) != (_MAGIC, _VERSION) or not pickles.load()["little_endian"]:
        raise NotSaved("it has another magic number, version or byte order")
    contents, keys = pickles.load(), pickles.load()
    for key in keys:
        file.seek(8, os.SEEK_CUR)  # the number of elements, which the tensors know
        storages[key].copy_(_filled(file, len(storages.pop(key))))
    if storages:
        raise NotSaved("it lacks storages of its tensors")
    return contents


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise UnpicklingError(f"Unsupported opcode {code}")


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(self: _Unpickler) -> None:
        self.take(_OPCODE)
        load(self)

    return counted


class _Unpickler(pickle._Unpickler):
    """Makes the values of pickles, and counts their memory.

    Args:
        file: open for reading.
        size: bytes of the whole file; all storages together have to fit into it.
        pickled: bytes of the pickles, at most.
        storage: gives the bytes of a storage, a uint8 tensor, by its key and their number.
    """

    stack: list[Any]  # of the base class
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: BinaryIO, size: int, pickled: int, storage: Callable[[str, int], Tensor]) -> None:
        super().__init__(file, encoding="utf-8")
        self._size, self._left = size, size
        self._memory = min(_FACTOR * size, _FACTOR_PICKLED * pickled) + _ROOM
        self._storage, self._storages = storage, dict[str, Tensor]()

    def take(self, size: int) -> None:
        """Count memory."""
        self._memory -= size
        if self._memory < 0:
            raise UnpicklingError("Unsupported size: it would take far more memory than the file has bytes")

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for; for a class of storages, the dtype of their values."""
        full, kind = f"{module}.{name}".replace("__builtin__.", "builtins."), name.removesuffix("Storage")
        if module in ("torch", "torch.storage") and name == f"{kind}Storage" and kind in _STORAGES:
            return _STORAGES[kind]
        if full.startswith("torch._utils._rebuild_tensor"):
            return self._tensor
        if full not in _CALLS and full not in _DTYPES:
            raise UnpicklingError(f"GLOBAL {full} is not allowed")
        return _DTYPES.get(full) or _CALLS[full]

    def persistent_load(self, pid: Any) -> Tensor:
        """The values of a storage, one-dimensional."""
        kind, dtype, key, _, count = pid[:5]
        if kind != "storage" or type(key) is not str or type(count) is not int or count < 0 or any(pid[5:]):
            raise UnpicklingError("Unsupported identity of a storage")
        if key not in self._storages:
            self.take(_TENSOR)
            self._left -= count * dtype.itemsize
            if self._left < 0:
                raise UnpicklingError("Unsupported storages, which are larger than the file")
            self._storages[key] = self._storage(key, count * dtype.itemsize)
        return self._storages[key].view(dtype)

    def _tensor(self, stored: Any, offset: int, shape: Any, stride: Any, *more: Any) -> Tensor:
        self.take(_TENSOR)
        values = _of(stored, Tensor)
        for dtype in more:
            values = values.view(dtype) if isinstance(dtype, torch.dtype) else values
        tensor: Tensor = values.as_strided(shape, stride, offset)  # refuses what lies outside the storage
        if tensor.numel() * tensor.element_size() > self._size + _EXPANDED:
            raise UnpicklingError("Unsupported size: a tensor is larger than the file")
        return tensor

    def _call(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)
        self.take(sys.getsizeof(self.stack[-1]))

    def _set_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) not in (dict, OrderedDict):
            raise UnpicklingError(f"Unsupported items in a {type(self.stack[-1]).__name__}")
        self.stack[-1].update((_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set_items(items)

    def _set_state(self) -> None:
        """Of attributes, only one of a module's state dict is used: the versions of its layers."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict or type(state) is not dict:
            raise UnpicklingError(f"Unsupported state of a {type(self.stack[-1]).__name__}")
        vars(self.stack[-1])["_metadata"] = state.get("_metadata")

    dispatch = _Opcodes(
        {
            code: _counted(pickle._Unpickler.dispatch[code])
            for code in b"\x80.hjqrJKM\x8aGXUN\x88\x89)]}(t\x85\x86\x87aecQ"
        }
        | {
            ord("R"): _call,
            ord("s"): _set_item,
            ord("u"): lambda self: self._set_items(self.pop_mark()),
            ord("b"): _set_state,
        }
    )


def _of(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise UnpicklingError(f"Unsupported argument: a {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    """A key of a mapping; hashing nested tuples recurses in C, without a limit."""
    if not all(isinstance(item, _KEYS) for item in (value if isinstance(value, tuple) else (value,))):
        raise UnpicklingError(f"Unsupported key: a {type(value).__name__}")
    return value


def _latin1(text: Any, codec: Any) -> bytes:
    """Bytes as protocol 2 has them; another codec could make a text much longer."""
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise UnpicklingError("Unsupported codec")
    return text.encode("latin-1")


_CALLS: dict[str, Callable[..., Any] | None] = {
    "_codecs.encode": _latin1,
    "builtins.bytearray": lambda data=b"", *codec: bytearray(_latin1(data, *codec) if codec else _of(data, bytes)),
    "builtins.complex": complex,
    "builtins.set": lambda items: set(map(_key, _of(items, list))),
    "collections.Counter": lambda counts=None: Counter(_of(counts or {}, dict)),
    "collections.OrderedDict": lambda items=(): OrderedDict((_key(key), value) for key, value in items),
    "torch.Size": lambda sizes: torch.Size(_of(sizes, tuple)),
    "torch.device": torch.device,
    "torch._utils._rebuild_parameter": lambda tensor, *_: _of(tensor, Tensor),
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: _of(tensor, Tensor),
    # A tensor or parameter with attributes; `rebuild` is one of the functions here.
    "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, arguments, state: rebuild(*_of(arguments, tuple)),
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
}


def check_extent(value: Any, left: int, depth: int = 0) -> int:
    """Refuse containers that are short in a file and endless to walk, such as a list that holds another one twice, and so on.

    Returns how many of the `left` values that it may stand for are left.

    Raises:
        NotSaved: if it stands for more, or is nested too deeply.
    """
    if left <= 0:
        raise NotSaved("it claims more values than a file of its size can contain")
    if depth > _DEEPEST:
        raise NotSaved(f"it has over {_DEEPEST} levels of nesting")
    if isinstance(value, Mapping | list | tuple | set):
        for item in value.values() if isinstance(value, Mapping) else value:
            left = check_extent(item, left - 1, depth + 1)
    return left
