"""A look through a pickle before it is unpickled: what it calls, with which arguments, and how much memory that takes.

torch's restricted unpickler may call functions that turn a few bytes into many: `bytearray(n)`, codecs that double their
input, copies of containers. The walk below follows the opcodes without making anything. It allows only the calls that
`torch.save` writes for tensors and plain containers, and adds up an upper bound of the memory that they take.
"""

from __future__ import annotations

import io
import pickletools
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from runner.config.errors import first_line

_FACTOR = 32  # bytes of memory for each byte of the file; what runs save takes up to 10
_FACTOR_PICKLED = 128  # bytes of memory for each byte of a pickle; what runs save takes about 50
_ROOM = 2**23  # bytes of memory that even the smallest pickle may take
_TENSOR = 1200  # bytes of a tensor without its values, in Python and C++
_SLOT = 16  # bytes of a place in a list that has just grown
_ITEM = 120  # bytes of an entry in a mapping or a set that has just grown
_MEMO = 100  # bytes of an entry in the memo
_MARK = 160  # bytes of an open sequence
_EXPANDED = 2**26  # bytes that tensors may stand for beyond what the file holds: a single number, say, seen as many
_DEEPEST = 64  # tuples inside each other; hashing them recurses in C, without a limit
_OLDER_PICKLES = 5  # a magic number, a version, facts of the system, the contents, and keys of the storages that follow
_LATIN1 = ("latin1", "latin-1")
_PLAIN = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
_SINGLE = ("NONE", "NEWTRUE", "NEWFALSE")
_EMPTY = {"EMPTY_LIST": ("list", 88), "EMPTY_DICT": ("dict", 264), "EMPTY_SET": ("set", 216)}


class NotSaved(Exception):
    """The file is not as `torch.save` writes them."""


class Oversized(Exception):
    """What is pickled would take far more memory than the file has bytes."""


@dataclass(slots=True)
class _Made:
    """Stands for what an opcode makes.

    Attributes:
        kind: `list`, `tuple`, `dict`, `storage`, `tensor` and so on; for a global its dotted name.
        items: how many a container holds.
        parts: the items of a tuple.
        depth: tuples inside each other.
    """

    kind: str
    items: int = 0
    parts: tuple[Any, ...] = ()
    depth: int = 0


Count = Callable[[tuple[Any, ...]], int | None]
"""Bytes of memory that a call with these arguments takes, or None for arguments that `torch.save` never writes."""
_OTHER, _STORAGE, _TENSOR_MADE, _NO_PARTS = _Made("other"), _Made("storage"), _Made("tensor"), _Made("tuple")


def load(file: BinaryIO, size: int, older: bool = False) -> Any:
    """Load what `torch.save` wrote onto the CPU: tensors and plain containers alone, after a look through it.

    Args:
        file: open for reading.
        size: its bytes.
        older: whether it may be of the format that torch wrote before version 1.6, which is not an archive.

    Raises:
        NotSaved: if it is not as `torch.save` writes files.
        UnpicklingError: if it holds more than tensors and plain containers.
        Exception: of any kind, if it is damaged or made by hand.
    """
    file.seek(0)
    archived = file.read(4) == b"PK\3\4"
    file.seek(0)
    if archived or not older:
        if reason := wrong_archive(file, size) if archived else "it is not a zip archive that can be read":
            raise NotSaved(reason)
        file.seek(0)
        pickled = torch._C.PyTorchFileReader(file).get_record("data.pkl")
        examine(io.BytesIO(pickled), 1, len(pickled), size)
    else:
        examine(file, _OLDER_PICKLES, size, size)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True)


def examine(file: BinaryIO, pickles: int, pickled: int, whole: int) -> None:
    """Look through pickles that follow each other in a file.

    Args:
        file: open for reading, at the first of them.
        pickles: how many there are.
        pickled: bytes of all of them, at most.
        whole: bytes of the file; all storages have to fit into it.

    Raises:
        UnpicklingError: if something is called that is not needed for tensors and plain containers.
        Oversized: if memory or storages go beyond their bounds.
        Exception: of any kind, if it is not a pickle.
    """
    walk = _Walk(min(_FACTOR * whole, _FACTOR_PICKLED * pickled) + _ROOM, whole)
    for _ in range(pickles):
        walk.through(file)


class _Walk:
    def __init__(self, memory: int, storages: int) -> None:
        self._memory = memory
        self._storages = storages
        self._seen: set[str] = set()
        self._records: set[str] = set()
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def through(self, file: BinaryIO) -> None:
        """Follow one pickle to its end."""
        self._stack, self._outer, self._memo = [], [], {}
        for opcode, argument, _ in pickletools.genops(file):
            self._step(opcode.name, argument)

    def _take(self, size: int) -> None:
        self._memory -= size
        if self._memory < 0:
            raise Oversized("it would take far more memory than the file has bytes")

    def _push(self, made: Any, size: int = 0) -> None:
        self._take(_SLOT + size)
        self._stack.append(made)

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("BINGET", "LONG_BINGET"):
            self._push(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._take(_MEMO)
            self._memo[argument] = stack[-1]
        elif name in _PLAIN:
            size = 0 if name == "BININT1" else sys.getsizeof(argument)
            self._push(argument if isinstance(argument, str | int) else _OTHER, size)
        elif name in _SINGLE:
            self._push(_OTHER)
        elif name == "EMPTY_TUPLE":
            self._push(_NO_PARTS)
        elif name in _EMPTY:
            kind, size = _EMPTY[name]
            self._push(_Made(kind), size)
        elif name == "MARK":
            self._take(_MARK)
            self._outer.append(stack)
            self._stack = []
        elif name.startswith("TUPLE"):
            self._tuple(self._marked() if name == "TUPLE" else [stack.pop() for _ in range(int(name[-1]))][::-1])
        elif name in ("APPENDS", "SETITEMS"):
            self._fill(self._marked(), name == "SETITEMS")
        elif name in ("APPEND", "SETITEM"):
            self._fill([stack.pop() for _ in range(1 if name == "APPEND" else 2)], name == "SETITEM")
        elif name == "GLOBAL":
            self._push(_Made(argument.replace(" ", ".", 1).replace("__builtin__.", "builtins.")), 64)
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            self._push(self._called(called, arguments), 64)
        elif name == "BUILD":
            state = stack.pop()
            if _kind(stack[-1]) != "OrderedDict" or _kind(state) != "dict":
                raise UnpicklingError(f"Unsupported state of a {_kind(stack[-1])}")
            self._take(_ITEM * (3 + state.items))
        elif name == "BINPERSID":
            self._push(self._storage(stack.pop()))
        elif name not in ("PROTO", "STOP"):
            raise UnpicklingError(f"Unsupported opcode {name}")

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _tuple(self, items: list[Any]) -> None:
        depth = 1 + max((item.depth for item in items if isinstance(item, _Made)), default=0)
        if depth > _DEEPEST:
            raise Oversized(f"it has over {_DEEPEST} levels of nesting")
        self._push(_Made("tuple", len(items), tuple(items), depth), 160 + 8 * len(items))

    def _fill(self, items: list[Any], mapping: bool) -> None:
        self._take(len(items) * (_ITEM // 2 if mapping else _SLOT))
        filled = self._stack[-1]
        if not isinstance(filled, _Made):
            raise UnpicklingError(f"Unsupported items in a {_kind(filled)}")
        filled.items += len(items)

    def _storage(self, identity: Any) -> _Made:
        parts: tuple[Any, ...] = identity.parts if isinstance(identity, _Made) else ()
        if len(parts) < 5 or not isinstance(parts[2], str) or not isinstance(parts[4], int):
            raise UnpicklingError("Unsupported identity of a storage")
        key, numbers = parts[2], parts[4]
        self._take(_TENSOR)
        if key not in self._seen:
            self._seen.add(key)
            # The archive's reader ignores case, and reads a record once for each spelling of its name.
            self._records.add(key.lower())
            self._storages -= numbers
        if len(self._records) < len(self._seen):
            raise UnpicklingError("Unsupported second name of a storage")
        if numbers < 0 or self._storages < 0:
            raise Oversized("its storages are larger than the file")
        return _STORAGE

    def _called(self, called: Any, arguments: Any) -> _Made:
        """What a call gives; its memory is counted."""
        name = _kind(called)
        if name not in _CALLS:
            raise UnpicklingError(f"GLOBAL {name} may not be called")
        memory = _counted(name, arguments)
        if memory is None:
            raise UnpicklingError(f"Unsupported arguments of {name}")
        self._take(memory)
        if name == "_codecs.encode":
            return _Made("bytes", len(arguments.parts[0]))
        return _TENSOR_MADE if "._rebuild_" in name else _Made(name.rpartition(".")[2])


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, _Made) else type(value).__name__


def _counted(name: str, arguments: Any) -> int | None:
    if _kind(arguments) != "tuple":
        return None
    try:
        return _CALLS[name](arguments.parts)
    except (IndexError, TypeError, ValueError, AttributeError):
        return None


def _of_container(kind: str) -> Count:
    """Counts a call that is given nothing, or copies one container."""

    def count(arguments: tuple[Any, ...]) -> int | None:
        if not arguments:
            return 300
        (copied,) = arguments
        return 300 + _ITEM * copied.items if _kind(copied) == kind else None

    return count


def _of_text(arguments: tuple[Any, ...]) -> int | None:
    """Counts a call that makes bytes of text; only Latin-1 makes one byte of each character."""
    text, codec = arguments
    return 64 + 2 * len(text) if isinstance(text, str) and codec in _LATIN1 else None


def _of_bytes(arguments: tuple[Any, ...]) -> int | None:
    """Counts a bytearray: empty, of bytes, or as older versions of Python write it; a number would be its length."""
    if len(arguments) == 2:
        return _of_text(arguments)
    return _of_container("bytes")(arguments)


def _of_tensor(arguments: tuple[Any, ...]) -> int | None:
    storage, _, shape = arguments[:3]
    return _TENSOR + 32 * shape.items if storage is _STORAGE and _kind(shape) == "tuple" else None


def _of_quantized(arguments: tuple[Any, ...]) -> int | None:
    size = _of_tensor(arguments)
    for side in arguments[2].parts:
        size = None if size is None else size * max(side, 1)
    return size


def _of_parameter(arguments: tuple[Any, ...]) -> int | None:
    """Counts a parameter with attributes of its own."""
    state = arguments[3]
    return _TENSOR + _ITEM * state.items if arguments[0] is _TENSOR_MADE and _kind(state) == "dict" else None


def _of_type(arguments: tuple[Any, ...]) -> int | None:
    """Counts a tensor with attributes of its own; another call inside makes it."""
    inner, state = _kind(arguments[0]), arguments[3]
    if "torch._utils._rebuild_" not in inner or inner not in _CALLS or _kind(state) != "dict":
        return None
    made = _counted(inner, arguments[2])
    return None if made is None else made + _TENSOR + _ITEM * state.items


def _fixed(size: int) -> Count:
    return lambda arguments: size


_CALLS: dict[str, Count] = {
    "_codecs.encode": _of_text,
    "builtins.bytearray": _of_bytes,
    "builtins.complex": _fixed(64),
    "builtins.set": _of_container("list"),
    "collections.Counter": _of_container("dict"),
    "collections.OrderedDict": _of_container("list"),
    "torch.Size": lambda arguments: 56 + 40 * arguments[0].items if _kind(arguments[0]) == "tuple" else None,
    "torch.device": _fixed(64),
    "torch.serialization._get_layout": _fixed(64),
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_tensor": _of_tensor,
    "torch._utils._rebuild_tensor_v2": _of_tensor,
    "torch._utils._rebuild_tensor_v3": _of_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _fixed(_TENSOR),
    "torch._utils._rebuild_parameter": _fixed(_TENSOR),
    "torch._utils._rebuild_parameter_with_state": _of_parameter,
    "torch._utils._rebuild_qtensor": _of_quantized,
    "torch._utils._rebuild_sparse_tensor": _fixed(_TENSOR),
}


def wrong_archive(file: BinaryIO, size: int) -> str:
    """Why an archive is not as `torch.save` makes them, or an empty string.

    Records of `torch.save` are not compressed, so all of them together fit into the file. A few kilobytes of a compressed
    archive stand for as many gigabytes as its maker likes.

    Args:
        file: the archive, open for reading.
        size: its bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        return f"it is not a zip archive that can be read ({error})"
    names = [record.filename.lower() for record in records]
    if len(set(names)) != len(names):
        return "its archive has two records of one name"
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        return "its archive is compressed, which torch.save never does"
    if sum(record.file_size for record in records) > size:
        return "its archive claims to hold more bytes than the file has"
    # torch has a reader of its own, which can be made to see another list of records than Python's.
    file.seek(0)
    try:
        reader = torch._C.PyTorchFileReader(file)
        listed = reader.get_all_records()
        seen = sum(reader.get_record_size(name) for name in listed)
    except RuntimeError as error:
        return f"it is not a zip archive that can be read ({first_line(error)})"
    if len({name.lower() for name in listed}) != len(listed) or seen > size:
        return "its archive has other records than it lists"
    return ""


def wrong_extent(contents: Any, size: int) -> str:
    """What in nested containers stands for more than a file can hold, or is a tensor that does not lie in it; or an empty string.

    A list that holds another one twice, which holds another one twice, and so on, is short in a file and endless to walk.

    Args:
        contents: as loaded; none of its tensors has been read.
        size: bytes of the file.
    """
    left = size + _EXPANDED // 64
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter([("", contents)]))]
    while stack:
        place, items = stack[-1]
        for key, value in items:
            name, left = f"{place}.{key}".lstrip(".")[:200], left - 1
            if left < 0:
                return "it stands for more values than a file of its size can hold"
            if isinstance(value, torch.Tensor):
                if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
                    return f"{name} is a tensor of a kind that is never saved"
                stored, shown = value.untyped_storage().nbytes(), value.numel() * value.element_size()
                if stored > size or shown > size + _EXPANDED:
                    return f"{name} is larger than the file"
            elif isinstance(value, str | bytes | bytearray) and len(value) > size:
                return f"{name} is larger than the file"
            elif isinstance(value, Mapping | list | tuple | set):
                if len(stack) > _DEEPEST:
                    return f"it has over {_DEEPEST} levels of nesting"
                inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
                stack.append((name, iter(inner)))
                break
        else:
            stack.pop()
    return ""
