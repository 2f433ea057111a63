"""The formats: each writes a model to a file, reads the file back as its users would, and returns the loaded model.

Every format gets the model on the CPU, in float32 and evaluation mode, and takes any batch size.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError

INPUT, OUTPUT = "images", "outputs"
_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")  # the packages that it needs
_INLINE_BYTES = 2**30  # larger weights go beside an ONNX file, which is a message of at most 2 GiB
_EXAMPLES = 2  # traced samples: torch.export takes a batch of 1 for a constant size


class Normalizing(nn.Module):
    """A model that takes decoded pixels and normalises them: `pixels * scale - shift`, both float32 (1, C, 1, 1)."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (B, K) of images uint8 (B, C, H, W)."""
        outputs: Tensor = self.model(images.float() * self.scale - self.shift)
        return outputs


def require_packages(formats: list[str]) -> None:
    """Raise a `UserError` that names the packages of formats that are not installed."""
    missing = [each for each in _OF_ONNX if "onnx" in formats and importlib.util.find_spec(each) is None]
    if missing:
        others = ", ".join(name for name in FORMATS if name != "onnx")
        problem = f"onnx needs packages that are not installed: {', '.join(missing)}"
        raise UserError("format", problem, f"pip install 'runner[export]', or {others}")


def write(name: str, model: nn.Module, images: Tensor, path: Path) -> nn.Module:
    """Write a model in evaluation mode, on the CPU, in a format, and load the file; `images` is a batch of any size.

    Raises:
        UserError: if the format cannot express the model, with the message of its exporter.
    """
    try:
        with torch.no_grad():
            return FORMATS[name][1](model, images[:1].repeat(_EXAMPLES, 1, 1, 1), path)
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:  # exporters can raise anything for a model that they cannot express
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        problem = f"{name} cannot express this model: {lines[0][:300]}"
        raise UserError("format", problem, "another format") from error


def _safetensors(model: nn.Module, example: Tensor, path: Path) -> nn.Module:
    from safetensors.torch import load_file, save

    # Clones, because the format refuses tied weights, which share memory.
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    again = copy.deepcopy(model)
    for value in again.state_dict().values():
        value.zero_()  # so that what the file does not have would be missed
    again.load_state_dict(load_file(path))
    return again


def _torch_export(model: nn.Module, example: Tensor, path: Path) -> nn.Module:
    content = io.BytesIO()  # torch's own writer ends the process where a disk is full
    torch.export.save(_exported(model, example), content)
    path.write_bytes(content.getbuffer())
    return torch.export.load(path).module()


def _exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _onnx(model: nn.Module, example: Tensor, path: Path) -> nn.Module:
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    names: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT], "dynamic_shapes": ({0: "batch"},)}
    with _quiet():
        program = _exported(model, example)
        torch.onnx.export(program, (), path, **names, external_data=size > _INLINE_BYTES, verbose=False)
    return OnnxModel(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what exporters log and deprecate about their own internals, which users cannot change."""
    before, root, handler = logging.root.manager.disable, logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)  # otherwise the first message through the root logger adds one that stays
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Deprecations of torch and onnxscript inside each other, which differ by release.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


class OnnxModel(nn.Module):
    """An ONNX model in onnxruntime, on as many threads as torch has."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors; users cannot change the graphs that warnings are about
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        """Outputs (B, K) of images (B, C, H, W), both on the CPU."""
        outputs: Any = self._session.run([OUTPUT], {INPUT: images.contiguous().numpy()})[0]
        return torch.from_numpy(outputs)


def _torchscript(model: nn.Module, example: Tensor, path: Path) -> nn.Module:
    with warnings.catch_warnings():
        # torch deprecates it as a whole, which the verb reports itself; and a tracer's doubts about Python values
        # are resolved by the comparison at several batch sizes.
        warnings.filterwarnings("ignore", message=r"`?torch\.jit\.", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"`?torch\.jit\.", category=FutureWarning)
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning)
        traced: Any = torch.jit.trace(model, example, check_trace=False)  # type: ignore[no-untyped-call]
        content = io.BytesIO()
        torch.jit.save(traced, content)
        path.write_bytes(content.getbuffer())
        loaded: nn.Module = torch.jit.load(path)  # type: ignore[no-untyped-call]
    return loaded


FORMATS: dict[str, tuple[str, Callable[[nn.Module, Tensor, Path], nn.Module]]] = {
    "safetensors": ("model.safetensors", _safetensors),
    "torch_export": ("model.pt2", _torch_export),
    "onnx": ("model.onnx", _onnx),
    "torchscript": ("model.torchscript", _torchscript),
}
"""The file of each format, and what writes and loads it: (model, example batch, path) -> the loaded model."""
