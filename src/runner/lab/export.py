"""`export`: write a checkpoint in other formats, compare each with the model, and describe the files.

Each format writes a model to a file, reads the file back as its users would, and gives the loaded model. It gets the model on the
CPU, in float32 and evaluation mode, and takes any batch size. Inputs are tensors (B, ...) by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
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
from runner.run.finetune import explaining, merged
from runner.run.from_checkpoint import ResolvedCheckpoint, output_folder, resolve_checkpoint
from runner.run.model import DataFacts, model_of
from runner.runtime.device import configure_torch
from runner.tasks.task import Task
from runner.tracking.environment import versions
from runner.tracking.verb_report import Report

INPUT, OUTPUT = "images", "outputs"  # of a model of images; others have those of their arguments and results
Inputs = dict[str, Tensor]
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
    return torch.export.load(path).module()


def _exported(model: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(model, tuple(example.values()), dynamic_shapes=(batch,) * len(example))


def _onnx(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    with torch.inference_mode():
        outputs = [*_outputs(model(*example.values()), _EXAMPLES)]
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


FORMATS: dict[str, tuple[str, Callable[[nn.Module, Inputs, Path], nn.Module]]] = {
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
    samples = max(_EXAMPLES, *config.batch_sizes)
    image, inputs = _inputs_of_samples(resolved, task, model) if config.data.images is not None else (data, {})
    if inputs:
        inputs = {name: _repeated(each, samples) for name, each in inputs.items()}
    else:
        # Noise as the exported model takes it: float32 and normalised, or uint8
        generator = torch.Generator().manual_seed(config.seed)
        shape = (samples, image.channels, *image.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if not config.include_preprocessing:
            images = resolved.input_pipeline(_CPU)(images, torch.arange(samples), 0)
        inputs = {INPUT: images}
    if "torchscript" in chosen:
        report.warn("torch deprecates TorchScript; torch_export replaces it")
    if config.include_preprocessing and config.transform.eval:
        report.warn("transform.eval is not part of what is exported: apply it to images first")

    exported = model
    if config.include_preprocessing:
        exported = _Normalizing(model, *resolved.input_pipeline(_CPU).of_bytes).eval()
    with torch.inference_mode():
        outputs = _outputs(exported(*inputs.values()), samples)
    if clash := sorted(inputs.keys() & outputs.keys()):
        raise UserError("model", f"returns '{clash[0]}', which is the name of an input too", "another name")
    run_directory = from_checkpoint.run_directory_of(resolved.found.path)
    default = None if run_directory is None else run_directory / "export"
    folder = output_folder(config.output, default, config.output_root, "exports")
    files, compared = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    # Several batch sizes, because an export may fix the one that it was traced with
    batches = [{name: each[:size] for name, each in inputs.items()} for size in config.batch_sizes]
    with report.counting("export", len(chosen)) as begin:
        for name in chosen:
            begin(name)
            # A file that is there is complete: other programs may watch the folder
            with _write_complete(folder / FORMATS[name][0], config.output is not None) as path:
                # Exporters can raise anything for a model that they cannot express
                with blame("format", f"{name} cannot express this model", "another format", OSError), torch.no_grad():
                    example = {key: _repeated(each[:1], _EXAMPLES) for key, each in inputs.items()}
                    loaded = FORMATS[name][1](merged(config, exported), example, path)
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                files[name] = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
            compared += _compare(name, exported, loaded, batches)
    record = _description(resolved, task, image, inputs, outputs)
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
def _compare(name: str, model: nn.Module, exported: nn.Module, batches: list[Inputs]) -> list[dict[str, Any]]:
    """Outputs of an exported model beside those of the model itself, at each batch size."""
    rows = list[dict[str, Any]]()
    for inputs in batches:
        size = len(next(iter(inputs.values())))
        expected, got = (_outputs(each(*inputs.values()), size) for each in (model, exported))
        found = {"max_abs": 0.0, "max_rel": 0.0}
        for key, own in expected.items():
            own, other = own.double(), got[key].double() if key in got else torch.empty(0)
            difference = float((own - other).abs().max()) if own.shape == other.shape else math.inf
            share = difference / max(1.0, float(own.abs().max()))  # of the largest output, or of 1 if that is larger
            # NaN is worse than any number
            worse = {"max_abs": difference, "max_rel": share}
            found = {each: worse[each] if not worse[each] <= found[each] else found[each] for each in found}
        rows.append({"format": name, "batch_size": size, **found})
    return rows


def _outputs(given: Any, samples: int) -> dict[str, Tensor]:
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


def _repeated(tensor: Tensor, samples: int) -> Tensor:
    return tensor[torch.arange(samples) % len(tensor)]


def _inputs_of_samples(resolved: ResolvedCheckpoint[Export], task: Any, model: nn.Module) -> tuple[DataFacts, Inputs]:
    """What is known of the image of samples of any kind, or the model's inputs if they are not one image, of a batch.

    The task's `export_inputs(batch)` says what they are; otherwise they are the field of the images, or what the model's
    `forward` names of the batch.
    """
    with contextlib.closing(resolved.data(_CPU)) as splits:
        data: Any = splits.evaluated_batch().data
    names, forward = resolved.config.data.images or [], inspect.signature(model.forward).parameters
    own = {name: each for name, each in forward.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    if given := callable(getattr(task, "export_inputs", None)):
        with explaining("task", "its export_inputs cannot take a batch: "):
            data = task.export_inputs(data)
    elif len(names) == 1:
        field = data if isinstance(data, Tensor) else data[names[0] if isinstance(data, Mapping) else int(names[0])]
        if isinstance(field, Tensor) and field.ndim == 4:
            channels, height, width = field.shape[1:]
            return DataFacts(resolved.classes, channels, (height, width)), {}
    if isinstance(data, Mapping):
        found = {name: data[name] for name in own if name in data}
    else:
        values = tuple(data) if isinstance(data, tuple | list) else (data,)
        # Of what else there is in a batch, such as targets, a model takes nothing
        taken = len(values) if given else sum(each.default is each.empty for each in own.values())
        found = dict(zip(own, values[:taken], strict=False))
    # An exported program takes its inputs by their places
    places = [name for name, each in own.items() if each.kind != each.KEYWORD_ONLY]
    missing = [name for name, each in own.items() if each.default is each.empty and name not in found]
    fits = not missing and list(found) == places[: len(found)] and len(found) > 0
    if resolved.config.include_preprocessing:
        raise UserError(
            "include_preprocessing", "is true, and the model does not take one field of images alone", "false"
        )
    if given and (len(data) if isinstance(data, Mapping) else len(values)) != len(found):
        raise UserError("task", "its export_inputs gives what forward does not take", ", ".join(own))
    if not fits or not all(isinstance(value, Tensor) and value.ndim for value in found.values()):
        problem = f"cannot tell the inputs of {type(model).__name__}: forward takes {', '.join(own)}, and a batch has "
        kinds = data.items() if isinstance(data, Mapping) else found.items()
        problem += ", ".join(f"{type(value).__name__} {name}" for name, value in kinds) or f"a {type(data).__name__}"
        allowed = "export_inputs(batch) of the task, which gives tensors (B, ...): one, a tuple, or a dict by the names of forward"
        raise UserError("task", problem, f"{allowed}, without a gap")
    return DataFacts(resolved.classes, 0, (0, 0)), {name: found[name] for name in own if name in found}


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
    resolved: ResolvedCheckpoint[Export], task: Task, image: DataFacts, inputs: Inputs, outputs: Inputs
) -> dict[str, Any]:
    """What the programs that use the files have to know."""
    config = resolved.config
    included, normalize = config.include_preprocessing, config.data.normalize

    def described(name: str, tensor: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": ["batch", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}

    taken, given = ([described(*each) for each in tensors.items()] for tensors in (inputs, outputs))
    preprocessing = None
    if image.channels:
        taken[0] |= {
            "values": "pixels from 0 to 255" if included else "normalised pixels, see preprocessing",
            "layout": "NCHW",
        }
        preprocessing = {
            "colours": {3: "RGB", 1: "grey"}.get(image.channels, f"{image.channels} channels"),
            "image_size": list(image.image_size),
            "data": config.data.dataset,
            "sample_eval": config.transform.sample_eval,
            "eval": config.transform.eval,
            "scale": 1 / 255,
            "mean": normalize.mean,
            "std": normalize.std,
            "normalization_in_the_model": included,
        }
    return {
        **resolved.record(),
        "weights_sha256": weights_sha256(resolved.weights[0]),
        "model": str(config.model["_target_"]),
        "task": str(config.task["_target_"]),
        "classes": from_checkpoint.unique_names(resolved.classes),
        "input": taken[0] if len(taken) == 1 else taken,
        "output": given[0] if len(given) == 1 else given,
        "activation": from_checkpoint.activation_of(task),
        "threshold": getattr(task, "threshold", None),
        "preprocessing": preprocessing,
    }
