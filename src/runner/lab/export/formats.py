"""Formats of exported models: each writes a model to a file and reads the file back as its users would.

It gets the model on the CPU, in float32 and evaluation mode, and gives the loaded model. Inputs are tensors (B, ...) by name.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError

INPUT, OUTPUT = "images", "outputs"  # of a model of images; others have those of their arguments and results
Inputs = dict[str, Tensor]
Writer = Callable[[nn.Module, Inputs, Path], nn.Module]
"""Writes a model with an example batch to a path, and gives what it reads back."""
_INLINE_BYTES = 2**30  # larger weights go beside an ONNX file, which is a message of at most 2 GiB
EXAMPLES = 2  # traced samples: torch.export takes a batch of 1 for a constant size


class Normalizing(nn.Module):
    """A model of decoded pixels, uint8 (B, C, H, W), which it normalises: `pixels * scale - shift`, both float32 (1, C, 1, 1)."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: Tensor) -> Any:
        """Outputs of uint8 images."""
        return self.model(images.float() * self.scale - self.shift)


def _safetensors(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
    from safetensors.torch import load_file, save

    # Clones, because the format refuses tied weights, which share memory.
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    again = copy.deepcopy(model)
    for value in again.state_dict().values():
        value.zero_()  # so that what the file does not have would be missed
    again.load_state_dict(load_file(path))
    return again


def _torch_export(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
    content = io.BytesIO()  # torch's own writer ends the process where a disk is full
    torch.export.save(_exported(model, example), content)
    path.write_bytes(content.getbuffer())
    with _quiet():
        return torch.export.load(path).module()


def _exported(model: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    # Strict where the code of a model takes len() of tensors, which otherwise fixes the batch size
    strict = any(getattr(module, "strict_export", False) for module in model.modules())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects", UserWarning)
        return torch.export.export(
            model, tuple(example.values()), dynamic_shapes=(batch,) * len(example), strict=strict
        )


def _onnx(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    with torch.inference_mode():
        outputs = [*outputs_of(model(*example.values()), EXAMPLES)]
    names: dict[str, Any] = {"input_names": [*example], "output_names": outputs}
    names["dynamic_shapes"] = ({0: "batch"}, *[None] * (len(example) - 1))  # the others have the same axis
    with _quiet():
        program = _exported(model, example)
        torch.onnx.export(program, (), path, **names, external_data=size > _INLINE_BYTES, verbose=False)
    return _OnnxModel(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what exporters log and deprecate about their own internals, which users cannot change."""
    before, root, handler = logging.root.manager.disable, logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)  # otherwise the first message through the root logger adds one that stays
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Deprecations of torch and onnxscript inside each other, which differ by release, and of TorchScript as a whole.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


class _OnnxModel(nn.Module):
    """An ONNX model in onnxruntime, on as many threads as torch has, on the CPU; it gives its outputs by name."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors; users cannot change the graphs that warnings are about
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        fed = zip((each.name for each in self._session.get_inputs()), inputs, strict=True)
        found: Any = self._session.run(None, {name: value.contiguous().numpy() for name, value in fed})
        names = [each.name for each in self._session.get_outputs()]
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}


def _torchscript(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
    with _quiet():
        # The comparison at several batch sizes resolves a tracer's doubts about Python values.
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
        inputs = tuple(example.values())
        traced: Any = torch.jit.trace(model, inputs, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
        content = io.BytesIO()
        torch.jit.save(traced, content)
        path.write_bytes(content.getbuffer())
        loaded: nn.Module = torch.jit.load(path)  # type: ignore[no-untyped-call]
    return loaded


def quantized(path: Path, images: Iterable[Tensor], target: Path) -> nn.Module:
    """Write an ONNX model of images with weights and activations of 8 bits, and load it.

    Ranges of activations are those of the outputs for `images`, batches (B, C, H, W); weights have a range for each channel.
    """
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        batches = iter(images)

        def get_next(self) -> dict[str, Any] | None:
            return next(({INPUT: batch.contiguous().numpy()} for batch in self.batches), None)

    prepared = target.with_suffix(".prepared.onnx")
    with _quiet():
        quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
        quantize_static(str(prepared), str(target), Reader(), per_channel=True)
    prepared.unlink()
    return _OnnxModel(target)


FORMATS: dict[str, tuple[str, Writer]] = {
    "safetensors": ("model.safetensors", _safetensors),
    "torch_export": ("model.pt2", _torch_export),
    "onnx": ("model.onnx", _onnx),
    "torchscript": ("model.torchscript", _torchscript),
}
"""The file of each format, and what writes and loads it."""


def images_of(data: Any, names: Sequence[str] | None) -> Any:
    """The field of images of a batch's data, (B, C, H, W), of pairs or of samples whose one field of images has this name."""
    if isinstance(data, Tensor):
        return data
    name = (names or ["0"])[0]
    return data[name if isinstance(data, Mapping) else int(name)]


def outputs_of(given: Any, samples: int) -> dict[str, Tensor]:
    """The tensors that a model returns for a batch, by name: `outputs` if it is one.

    Raises `UserError` if it returns anything but tensors with a row for each sample.
    """
    if isinstance(given, Mapping):
        found = {str(name): value for name, value in given.items()}
    else:
        several = isinstance(given, tuple | list)
        found = {f"{OUTPUT}_{place}": value for place, value in enumerate(given)} if several else {OUTPUT: given}
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,) or not value.numel() or value.is_complex():
            got = f"{type(value).__name__} {tuple(value.shape) if isinstance(value, Tensor) else ''}"
            problem = f"returns {got.strip()} as {name} for {samples} samples"
            allowed = "a model that returns a tensor (B, ...), or a dict or tuple of them"
            raise UserError("model", problem, allowed)
    return found
