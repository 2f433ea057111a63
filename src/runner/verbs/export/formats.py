"""The formats: each writes a model to a file, reads the file back as its users would, and returns the loaded model.

Every format gets the model on the CPU, in float32 and evaluation mode, and takes any batch size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.errors import UserError

Run = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) -> outputs (B, K), both on the CPU."""

INPUT, OUTPUT = "images", "outputs"
SUFFIXES = {
    "safetensors": "model.safetensors",
    "torch_export": "model.pt2",
    "onnx": "model.onnx",
    "torchscript": "model.torchscript",
}
INT8 = "model.int8.onnx"
_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
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
    """Refuse formats whose packages are not installed.

    Raises:
        UserError: naming them.
    """
    missing = [
        (name, package)
        for name in formats
        for package in _PACKAGES.get(name, ())
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        needs = "; ".join(f"{name} needs {package}" for name, package in missing)
        others = ", ".join(name for name in SUFFIXES if name not in _PACKAGES)
        raise UserError("format", f"{needs}, which is not installed", f"pip install 'runner[export]', or {others}")


def write(name: str, model: nn.Module, images: Tensor, path: Path, fresh: Callable[[], nn.Module]) -> Run:
    """Write a model in a format and load the file.

    Args:
        name: of the format.
        model: in evaluation mode, on the CPU.
        images: an example batch of any size.
        path: where to write.
        fresh: builds the same model with other weights, for a format that stores weights alone.

    Raises:
        UserError: if the format cannot express the model, with the message of its exporter.
    """
    example = images[:1].repeat(_EXAMPLES, 1, 1, 1)
    try:
        if name == "safetensors":
            return _safetensors(model, path, fresh)
        if name == "torch_export":
            return _torch_export(model, example, path)
        if name == "onnx":
            return _onnx(model, example, path)
        assert name == "torchscript", name
        return _torchscript(model, example, path)
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:  # exporters can raise anything for a model that they cannot express
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        problem = f"{name} cannot express this model: {lines[0][:300]}"
        raise UserError("format", problem, "another format") from error


def _safetensors(model: nn.Module, path: Path, fresh: Callable[[], nn.Module]) -> Run:
    from safetensors.torch import load_file, save

    # Clones, because the format refuses tied weights, which share memory.
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    again = fresh()
    again.load_state_dict(load_file(path))
    return inferring(again.eval())


def _torch_export(model: nn.Module, example: Tensor, path: Path) -> Run:
    torch.export.save(_exported(model, example), path)
    return inferring(torch.export.load(path).module())


def _exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def _onnx(model: nn.Module, example: Tensor, path: Path) -> Run:
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    with _quiet():
        torch.onnx.export(
            _exported(model, example),
            (),
            path,
            input_names=[INPUT],
            output_names=[OUTPUT],
            external_data=size > _INLINE_BYTES,
            verbose=False,
        )
    return session(path)


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


def session(path: Path) -> Run:
    """An ONNX model in onnxruntime, on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors; users cannot change the graphs that warnings are about
    loaded = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        outputs: Any = loaded.run([OUTPUT], {INPUT: images.contiguous().numpy()})[0]
        return torch.from_numpy(outputs)

    return run


def _torchscript(model: nn.Module, example: Tensor, path: Path) -> Run:
    with warnings.catch_warnings():
        # torch deprecates it as a whole, which the verb reports itself; and a tracer's doubts about Python values
        # are resolved by the comparison at several batch sizes.
        warnings.filterwarnings("ignore", message=r"`?torch\.jit\.", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"`?torch\.jit\.", category=FutureWarning)
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning)
        with torch.no_grad():
            traced: Any = torch.jit.trace(model, example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, path)
        loaded: nn.Module = torch.jit.load(path)  # type: ignore[no-untyped-call]
    return inferring(loaded)


def inferring(model: nn.Module) -> Run:
    """A model as a function, without gradients."""

    def run(images: Tensor) -> Tensor:
        with torch.inference_mode():
            outputs: Tensor = model(images)
        return outputs

    return run


def quantized(source: Path, target: Path) -> Run:
    """Write an ONNX model with 8-bit weights, activations quantised at run time (dynamic quantisation).

    Raises:
        UserError: if onnxruntime cannot quantise it.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    # onnxruntime refuses the exporter's shapes once quantisation has changed the layout of weights.
    del model.graph.value_info[:]
    with _quiet():
        # Unsigned: of 8-bit convolutions onnxruntime computes only those on the CPU.
        quantize_dynamic(model, target, weight_type=QuantType.QUInt8)
    return session(target)
