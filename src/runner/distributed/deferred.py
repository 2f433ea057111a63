"""A model without the memory for its weights, until each of them is needed, with the bits that it would have had.

While a model is built its tensors have no values (they are on the device `meta`), and what would have computed the values is
recorded: calls that create or change tensors, and the state of the random generator before each one that draws. The generator
advances as usual. So a weight's values can be computed at any time, by repeating the calls that they depend on.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.instrument.nested import mapped_items, tensors_in
from runner.instrument.no_trace import SavedRNG

T = TypeVar("T")

# The result of a call with one of these depends on values, as `item()` does.
_NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# They change which memory a tensor has, so the memory no longer tells what was computed.
_UNKNOWN = {"aten::set_", "aten::resize_", "aten::resize_as_"}

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _take_from_system(size: int) -> None:
    """Let glibc take memory of at least `size` bytes from the system, and give it back once it is free.

    By default it keeps what large tensors leave behind between smaller ones, which would be as much as the whole model.
    """
    with contextlib.suppress(OSError, AttributeError):  # of another library
        ctypes.CDLL(None).mallopt(-3, size)  # M_MMAP_THRESHOLD


def is_blank(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    return tensor.device.type == "meta"


@dataclass(frozen=True)
class _View:
    """A tensor without values as it was when a call was recorded."""

    storage: Any  # identifies the values; held, so that no other gets its address
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, stride

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        place = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        return cls(tensor.untyped_storage(), tensor.dtype, place)

    @property
    def key(self) -> int:
        return int(self.storage._cdata)


class _Call(NamedTuple):
    """A call that created or changed tensors without values."""

    function: Any
    args: Any  # (args, kwargs) with views instead of tensors without values, and copies of those with values
    drawn: Tensor | None  # the generator's state before it
    outputs: list[_View]
    reads: frozenset[int]  # keys of storages
    writes: frozenset[int]


class _Claims(TorchFunctionMode):
    """Answers that no tensor is without values: some functions, such as `nn.init.orthogonal_`, would do nothing for these."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if function == _IS_META else function(*args, **(kwargs or {}))


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, `construct` builds a model whose weights have no values, and whatever uses weights computes theirs first.

    Values that are computed are not kept: memory has to hold the largest weight, not all of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""  # why the model was built with all its weights
        self._calls: list[_Call] = []
        self._constructing = False
        self._made: Mapping[int, Tensor] = weakref.WeakValueDictionary()  # by id of what it replaces
        self._replaced: list[Tensor] = []  # so that no id is used again
        self._claims = _Claims()

    def __enter__(self) -> Deferred:
        _take_from_system(1 << 20)
        self._claims.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *trace: Any) -> None:
        super().__exit__(*trace)  # type: ignore[no-untyped-call]
        self._claims.__exit__(*trace)  # type: ignore[no-untyped-call]

    def construct(self, build: Callable[[], T]) -> T:
        """What `build` returns, with weights without values; with values, and a `reason`, if that is impossible."""
        generators, self._constructing = SavedRNG(), True
        try:
            model = build()
            self._constructing = False
            if isinstance(model, nn.Module):
                self._materialize_others(model)
            return model
        except Exception as error:  # also of a config that is wrong, which is raised again below
            self.reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        finally:
            self._constructing = False
        self._calls.clear()
        generators.restore()
        return build()

    def _materialize_others(self, model: nn.Module) -> None:
        """Give values to buffers and other tensors, which are not divided."""
        for module in model.modules():
            for name, value in (*vars(module).items(), *module._buffers.items()):
                if isinstance(value, Tensor) and is_blank(value):
                    made = self._once(value)
                    if name in module._buffers:
                        module._buffers[name] = made
                    else:
                        setattr(module, name, made)
                elif name not in ("_parameters", "_buffers", "_modules") and any(
                    is_blank(tensor) for tensor in tensors_in(value)
                ):
                    raise NotImplementedError(f"{type(module).__name__}.{name} holds tensors")

    def finish(self) -> None:
        """Forget what was recorded, once all weights have values."""
        self._calls.clear()
        _take_from_system(32 << 20)

    def materialize(self, module: nn.Module, device: torch.device) -> None:
        """Give values to all weights of a module, in place; what they replace stays usable as a key only."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and is_blank(parameter):
                    part._parameters[name] = self._once(parameter, device)  # type: ignore[assignment]

    def _once(self, tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The tensor with values; the same one for the same tensor, as weights may be tied."""
        made = self._made.get(id(tensor))
        if made is None:
            made = self.values(tensor).to(device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._made[id(tensor)] = made  # type: ignore[index]
            self._replaced.append(tensor)
        return made

    @torch.no_grad()
    def values(self, tensor: Tensor) -> Tensor:
        """A tensor's values, computed now, on the CPU.

        Raises:
            NotImplementedError: if they are not known.
        """
        wanted, calls = _View.of(tensor), list[_Call]()
        needed = {wanted.key}
        for call in reversed(self._calls):
            if call.writes & needed:
                calls.append(call)
                needed |= call.reads
        calls.reverse()
        last = {key: number for number, call in enumerate(calls) for key in call.reads | call.writes}
        made: dict[int, Any] = {}

        def real(value: _View) -> Tensor:
            if value.key not in made:
                raise NotImplementedError("the values of a tensor are not known")
            return torch.empty(0, dtype=value.dtype).set_(made[value.key], *value.place)

        saved = torch.get_rng_state()
        try:
            for number, call in enumerate(calls):
                if call.drawn is not None:
                    torch.set_rng_state(call.drawn)
                args, kwargs = mapped_items(call.args, _View, real)
                outputs = tensors_in(call.function(*args, **kwargs))
                for view, output in zip(call.outputs, outputs, strict=True):
                    if view.key not in made:
                        if view.place != _View.of(output).place:
                            raise NotImplementedError(f"{call.function} lays memory out in another way")
                        made[view.key] = output.untyped_storage()
                for key in call.reads | call.writes:
                    if last[key] == number and key != wanted.key:  # nothing needs it any more
                        made.pop(key, None)
            return real(wanted)
        finally:
            torch.set_rng_state(saved)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        blank = [tensor for tensor in tensors if is_blank(tensor)]
        creates = not tensors and self._constructing and _creates(function, kwargs)
        if not blank and not creates:
            return function(*args, **kwargs)
        written = [tensor for tensor in _written(function, args, kwargs) if is_blank(tensor)]
        elsewhere = torch.device(kwargs.get("device") or "meta").type != "meta"
        mixed = len(blank) < len(tensors)
        if not creates and not written and (mixed or elsewhere or _NEED_VALUES & {*function.tags}):
            return self._on_values(function, args, kwargs)
        if creates:
            kwargs = kwargs | {"device": torch.device("meta")}
        return self._recorded(function, args, kwargs, blank, written)

    def _on_values(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function now, with values for tensors that have none, where the others are."""
        found = (tensor.device for tensor in tensors_in((args, kwargs)) if not is_blank(tensor))
        device = next(found, torch.device("cpu"))
        args, kwargs = mapped_items(
            (args, kwargs), Tensor, lambda tensor: self.values(tensor).to(device) if is_blank(tensor) else tensor
        )
        return function(*args, **kwargs)

    def _recorded(self, function: Any, args: Any, kwargs: Any, blank: list[Tensor], written: list[Tensor]) -> Any:
        """Call a function on tensors without values, and record the call unless it returns a view only."""
        if function._schema.name in _UNKNOWN:
            raise NotImplementedError(f"{function._schema.name} cannot be repeated")
        stored: Any = mapped_items(
            (args, kwargs), Tensor, lambda tensor: _View.of(tensor) if is_blank(tensor) else tensor.clone()
        )
        reads = frozenset(_View.of(tensor).key for tensor in blank)
        drawn = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            if kwargs.get("generator") is not None:
                raise NotImplementedError(f"{function._schema.name} draws from a generator of its own")
            drawn = torch.get_rng_state()
            self._draw(function, args, kwargs, written)
        try:
            result = function(*args, **kwargs)
        except NotImplementedError:
            if not written:
                return self._on_values(function, args, kwargs)
            result = written[0]  # only values change
        stored[1].pop("device", None)  # of what is created: on the CPU
        made = [_View.of(tensor) for tensor in tensors_in(result)]
        writes = frozenset({_View.of(tensor).key for tensor in written} | {view.key for view in made} - reads)
        if writes:
            self._calls.append(_Call(function, stored, drawn, made, reads, writes))
        return result

    def _draw(self, function: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Advance the generator as the call would; what is drawn is dropped."""
        targets = {id(tensor) for tensor in written}

        def scratch(tensor: Tensor) -> Tensor:
            if id(tensor) in targets:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return self.values(tensor) if is_blank(tensor) else tensor

        args, kwargs = mapped_items((args, kwargs), Tensor, scratch)
        function(*args, **{name: value for name, value in kwargs.items() if name != "device"})


def _creates(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without tensors creates one on the CPU."""
    device = torch.device(kwargs.get("device") or "cpu")
    return device.type == "cpu" and any(argument.name == "device" for argument in function._schema.arguments)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call changes."""
    found = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found
