"""`export`: write a checkpoint in other formats, compare each with the model, and describe the files.

Each format writes a model to a file, reads the file back as its users would, and gives the loaded model. It gets the model on the
CPU, in float32 and evaluation mode, and takes any batch size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import io
import logging
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import FAILED, UserError, blame, require
from runner.base.files import replacing, write_json, writing
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.schema.verbs import Export
from runner.run import from_checkpoint
from runner.run.from_checkpoint import ResolvedCheckpoint, output_folder, resolve_checkpoint
from runner.run.model import DataFacts, model_of
from runner.runtime.device import configure_torch
from runner.tasks.task import Task
from runner.tracking.environment import versions
from runner.tracking.verb_report import Report

INPUT, OUTPUT = "images", "outputs"
_INLINE_BYTES = 2**30  # larger weights go beside an ONNX file, which is a message of at most 2 GiB
_EXAMPLES = 2  # traced samples: torch.export takes a batch of 1 for a constant size


class _Normalizing(nn.Module):
    """A model of decoded pixels, uint8 (B, C, H, W), which it normalises: `pixels * scale - shift`, both float32 (1, C, 1, 1)."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.model(images.float() * self.scale - self.shift)
        return outputs


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
    """An ONNX model in onnxruntime, on as many threads as torch has: images (B, C, H, W) to outputs (B, K), on the CPU."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors; users cannot change the graphs that warnings are about
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        outputs: Any = self._session.run([OUTPUT], {INPUT: images.contiguous().numpy()})[0]
        return torch.from_numpy(outputs)


def _torchscript(model: nn.Module, example: Tensor, path: Path) -> nn.Module:
    with _quiet():
        # The comparison at several batch sizes resolves a tracer's doubts about Python values.
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
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

_CPU = torch.device("cpu")


def run(composition: Composition) -> float:
    """Export a checkpoint; returns the largest relative difference of any format, and exits with 1 if it exceeds `tolerance`."""
    report = Report(composition.values["json"])
    resolved = resolve_checkpoint(composition, Export, from_checkpoint.MODEL)
    # Everything below is about the model as it computes in float32 on the CPU, whatever it was trained on.
    config = dataclasses.replace(resolved.config, channels_last=False, matmul_precision=None, detect_anomaly=False)
    resolved = dataclasses.replace(resolved, config=config)
    chosen = list(dict.fromkeys(from_checkpoint.as_list(config.format)))
    if "onnx" in chosen:
        others = ", ".join(name for name in FORMATS if name != "onnx")
        require("format", "runner[export]", "onnx", "onnxscript", "onnxruntime", otherwise=f", or {others}")
    configure_torch(config, _CPU)
    report.warnings(resolved.found.warnings)
    data = resolved.data_facts()
    task, modules = resolved.restore_model(data, _CPU)
    # Exported models predict only
    model = model_of(modules).requires_grad_(False)
    if config.data.images is not None:
        data = _facts_of_samples(resolved)
    # Noise as the exported model takes it: float32 and normalised, or uint8
    generator = torch.Generator().manual_seed(config.seed)
    shape = (max(2, *config.batch_sizes), data.channels, *data.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if not config.include_preprocessing:
        images = resolved.input_pipeline(_CPU)(images, torch.arange(len(images)), 0)
    if "torchscript" in chosen:
        report.warn("torch deprecates TorchScript; torch_export replaces it")
    if config.include_preprocessing and config.transform.eval:
        report.warn("transform.eval is not part of what is exported: apply it to images first")

    exported = model
    if config.include_preprocessing:
        exported = _Normalizing(model, *resolved.input_pipeline(_CPU).of_bytes).eval()
    with torch.inference_mode():
        outputs = exported(images)
    if not isinstance(outputs, Tensor):
        problem = f"returns {type(outputs).__name__}; only models that return one tensor can be exported"
        raise UserError("model", problem, "a model that returns a tensor")
    run_directory = from_checkpoint.run_directory_of(resolved.found.path)
    default = None if run_directory is None else run_directory / "export"
    folder = output_folder(config.output, default, config.output_root, "exports")
    files, compared = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    # Several batch sizes, because an export may fix the one that it was traced with
    batches = [images[:size] for size in config.batch_sizes]
    with report.counting("export", len(chosen)) as begin:
        for name in chosen:
            begin(name)
            # A file that is there is complete: other programs may watch the folder
            with _write_complete(folder / FORMATS[name][0], config.output is not None) as path:
                # Exporters can raise anything for a model that they cannot express
                with blame("format", f"{name} cannot express this model", "another format", OSError), torch.no_grad():
                    loaded = FORMATS[name][1](exported, images[:1].repeat(_EXAMPLES, 1, 1, 1), path)
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[name] = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
            compared += _compare(name, exported, loaded, batches)
    record = _description(resolved, task, data, images, outputs)
    record |= {"files": files, "tolerance": config.tolerance, "comparison": compared, "versions": versions()}
    written = [*(folder / each["file"] for each in files.values()), folder / "model.json"]
    write_json(written[-1], record, named=config.output is not None)
    report.line(resolved.described())
    rows = [
        [each["format"], str(each["batch_size"]), f"{each['max_abs']:.2g}", f"{each['max_rel']:.2g}"]
        for each in compared
    ]
    columns = ["format", "batch", "largest difference", "relative"]
    report.table("compared with the model on the CPU, float32", columns, rows)
    report.lines(*written)
    report.json(record, written=[str(path) for path in written])
    # The files are written even if one differs, so that the difference can be studied
    worst = next((each for each in compared if not each["max_rel"] <= config.tolerance), None)  # NaN is worse, too
    if worst is not None:
        apart = f"differs from the model by {worst['max_rel']:.2g} of its largest output at batch size {worst['batch_size']}"
        print(f"error: {worst['format']} {apart}, more than tolerance={config.tolerance:g}", file=sys.stderr)
        raise SystemExit(FAILED)
    return float(max(each["max_rel"] for each in compared))


@torch.inference_mode()
def _compare(name: str, model: nn.Module, exported: nn.Module, batches: list[Tensor]) -> list[dict[str, Any]]:
    """Outputs of an exported model beside those of the model itself, at each batch size."""
    found = list[dict[str, Any]]()
    for images in batches:
        expected, got = model(images).double(), exported(images).double()
        difference = float((expected - got).abs().max()) if expected.shape == got.shape else math.inf
        share = difference / max(1.0, float(expected.abs().max()))  # of the largest output, or of 1 if that is larger
        found.append({"format": name, "batch_size": len(images), "max_abs": difference, "max_rel": share})
    return found


def _facts_of_samples(resolved: ResolvedCheckpoint[Export]) -> DataFacts:
    """What is known of the image of samples of any kind, of which the first are read."""
    names = resolved.config.data.images or []
    with contextlib.closing(resolved.data(_CPU)) as splits:
        data: Any = splits.evaluated_batch().data
    fields = [data[name if isinstance(data, Mapping) else int(name)] for name in names]
    if len(fields) != 1 or not isinstance(fields[0], Tensor):
        kinds = ", ".join(type(field).__name__ for field in fields)
        problem = f"needs a model of one tensor (B, C, H, W), and data.images={names} gives this one a {kinds}"
        allowed = "predict for what it predicts, or runner.load(RUN) in Python for the model, such as a detector"
        raise UserError("export", problem, allowed)
    channels, height, width = fields[0].shape[1:]
    return DataFacts(resolved.classes, channels, (height, width))


@contextlib.contextmanager
def _write_complete(path: Path, named: bool) -> Iterator[Path]:
    """A path to write to; files get their names only once they are complete. For `named` see `replacing`."""
    # Large weights of ONNX lie in a second file beside the first, and its name is in the first.
    with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".export.") as scratch:
        yield Path(scratch) / path.name
        for file in Path(scratch).iterdir():
            with file.open("rb") as content, replacing(path.with_name(file.name), named=named) as target:
                shutil.copyfileobj(content, target)


def _description(
    resolved: ResolvedCheckpoint[Export], task: Task, data: DataFacts, images: Tensor, outputs: Tensor
) -> dict[str, Any]:
    """What the programs that use the files have to know."""
    config = resolved.config
    included, normalize = config.include_preprocessing, config.data.normalize
    return {
        **resolved.record(),
        "weights_sha256": weights_sha256(resolved.weights[0]),
        "model": str(config.model["_target_"]),
        "task": str(config.task["_target_"]),
        "classes": from_checkpoint.unique_names(resolved.classes),
        "input": {
            "name": INPUT,
            "shape": ["batch", *images.shape[1:]],
            "dtype": str(images.dtype).removeprefix("torch."),
            "values": "pixels from 0 to 255" if included else "normalised pixels, see preprocessing",
            "layout": "NCHW",
        },
        "output": {"name": OUTPUT, "shape": ["batch", *outputs.shape[1:]], "dtype": "float32"},
        "activation": from_checkpoint.activation_of(task),
        "threshold": getattr(task, "threshold", None),
        "preprocessing": {
            "colours": {3: "RGB", 1: "grey"}.get(data.channels, f"{data.channels} channels"),
            "image_size": list(data.image_size),
            "data": config.data.dataset,
            "sample_eval": config.transform.sample_eval,
            "eval": config.transform.eval,
            "scale": 1 / 255,
            "mean": normalize.mean,
            "std": normalize.std,
            "normalization_in_the_model": included,
        },
    }
