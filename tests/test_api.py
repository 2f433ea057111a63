"""The program as a library: what `from runner import ...` gives, and what it promises."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import html
import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs_that_ended_early
import torch
import yaml
from extended import some
from PIL import Image

import runner
from runner import compose, evaluate, load, train
from runner.base.errors import UserError
from runner.lab.report.reading import Run
from runner.lab.report.report import Report
from runner.lab.report.table import Row, Spread, Table

WORDS = ("model=mlp", "model.hidden=[16]", "threads=1", "logger=none", "log.progress=false", "log.curves=false")
DOCS = Path(__file__).resolve().parents[1] / "docs"
OWN = """
import torch
from runner.data.sources.digits import digits
from runner.optim.losses import CrossEntropy

class Optimizer(torch.optim.SGD):
    pass

class Loss(CrossEntropy):
    pass

class Callback:
    def on_step(self, loop):
        pass

def data():
    return digits()
"""


@pytest.fixture
def trained(train_once: Callable[..., Any]) -> Path:
    return Path(train_once("model=mlp", "model.hidden=[16]", "epochs=2").directory)


@pytest.fixture
def pictures(workdir: Path) -> Path:
    folder = workdir / "pictures"
    folder.mkdir()
    for name, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (3, 20, 16), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def test_the_names_and_their_arguments_are_those_that_are_documented() -> None:
    report = "places columns sort seeds diff csv md json html against save_baseline tolerance"
    assert {name: " ".join(inspect.signature(getattr(runner, name)).parameters) for name in runner.__all__} == {
        "compose": "overrides config_dir",
        "evaluate": "checkpoint overrides config_dir",
        "gather": "tensor",
        "load": "checkpoint overrides device config_dir",
        "report": report,
        "runs": "places",
        "train": "overrides config_dir",
    }
    names = [field.name for field in dataclasses.fields(runner.api.Trained)]
    assert names == ["model", "classes", "preprocess", "config", "path", "step", "weights", "metrics", "task", "device"]
    assert [field.name for field in dataclasses.fields(runner.api.Result)] == ["directory", "summary", "value"]
    fields = {each: [field.name for field in dataclasses.fields(each)] for each in (Run, Row, Spread, Table, Report)}
    assert fields == {
        Run: ["path", "status", "error", "config", "overrides", "summary", "repeat"],
        Row: ["runs", "values"],
        Spread: ["mean", "std", "count"],
        Table: ["keys", "metrics", "rows", "folded", "metric"],
        Report: ["runs", "table", "tables", "notes", "difference", "comparison"],
    }
    methods = "name monitor mode choices metrics speed samples_per_step records environment value"
    assert {name for name in vars(Run) if not name.startswith("_")} - {*fields[Run]} == {*methods.split()}


@pytest.mark.parametrize("code", some([
    "import runner, sys; assert 'torch' not in sys.modules",
    "import runner.train; from runner import train; assert train.__module__ == 'runner.api', train",
    "from runner.train import build_run; import runner; assert runner.train.__module__ == 'runner.api'",
], 0, 1))  # fmt: skip
def test_train_is_the_function_whatever_was_imported_before_and_the_package_imports_no_torch(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_from_python_has_the_bits_of_the_same_run_from_the_command_line(workdir: Path, trained: Path) -> None:
    known = json.loads((trained / "summary.json").read_text())
    result = train(*WORDS, "epochs=2", "hydra.run.dir=here")
    assert result.directory == Path("here")
    assert result.summary["status"] == "finished"
    assert result.summary["weights_sha256"] == known["weights_sha256"]
    assert result.value == known["best"]["value"]
    of_config = train(dataclasses.replace(compose(*WORDS, "epochs=1"), epochs=2, output_root="of_config"))
    assert of_config.summary["weights_sha256"] == known["weights_sha256"]
    assert of_config.directory.is_relative_to("of_config")


def test_a_run_is_resumed_from_python(workdir: Path) -> None:
    words = (*WORDS, "scheduler=constant")
    first = train(*words, "epochs=1")
    rest = train(f"ckpt_path={first.directory}", "epochs=2")
    assert Path(rest.summary["resumed_from"]).is_relative_to(first.directory)
    assert rest.summary["weights_sha256"] == train(*words, "epochs=2").summary["weights_sha256"]


def test_a_notebook_shows_a_config_as_yaml_with_secrets_masked() -> None:
    config = compose(*WORDS, "seed=7", "notes='https://me:abcdef123456@example.org'")
    text = html.unescape(re.sub("</?pre.*?>", "", config._repr_html_()))
    assert yaml.safe_load(text)["seed"] == 7
    assert yaml.safe_load(text)["checkpoint"]["async"] is True
    assert "abcdef123456" not in text


@pytest.mark.parametrize("words", [(), ("+callbacks.mine._target_=mine.Broken",)], ids=["finished", "failed"])
def test_a_run_that_has_ended_leaves_no_thread_and_no_open_file(
    workdir: Path, own_module: Any, words: tuple[str, ...]
) -> None:
    own_module("mine", "class Broken:\n    def on_end(self, loop):\n        raise LookupError('mine')\n")
    # Not even until the garbage is collected, which may be long after in a notebook
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            train(*WORDS, *words)
        opened = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
        assert not [path for path in opened if path.is_relative_to(workdir)]
        assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]
    finally:
        gc.enable()


def test_a_loaded_model_predicts_what_the_command_line_predicts(run: Any, trained: Path, pictures: Path) -> None:
    assert run("predict", f"ckpt_path={trained}", f"input={pictures}", "output=rows.jsonl", "top_k=2").status == 0

    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    model = load(trained, device="cpu")
    assert not model.model.training
    assert model.classes == tuple("0123456789")
    assert (model.directory, model.path) == (trained, trained / "checkpoints/best.safetensors")
    found = model.predict(pictures, top_k=2)
    assert [row["prediction"] for row in found] == [row["prediction"] for row in rows]
    assert [row["probability"] for row in found] == pytest.approx([row["probability"] for row in rows], abs=1e-6)


def test_the_same_image_in_any_form_gives_the_same_input(trained: Path, pictures: Path) -> None:
    path = pictures / "0.png"
    picture = Image.open(path)
    picture.load()
    array = np.array(picture)
    forms = [path, str(path), picture, array, array[..., None], torch.from_numpy(array)[None]]
    model = load(trained, device="cpu")
    inputs = model.preprocess(forms)
    assert inputs.shape == (6, 1, 8, 8)
    assert torch.equal(inputs, inputs[:1].expand_as(inputs))
    assert len(model.predict(forms)) == 6
    with pytest.raises(TypeError, match="uint8"):
        model.preprocess(np.zeros((4, 4)))


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "LA", "JPEG", "PA", "La"]
)
def test_an_image_in_memory_is_read_as_its_file_is(trained: Path, workdir: Path, mode: str) -> None:
    colors = np.random.default_rng(1).integers(90, 166, (14, 10, 3), dtype=np.uint8)
    same = {"JPEG": "RGB", "PA": "P", "La": "LA", "I;16": "L"}.get(mode, mode)
    image, exif, path = Image.fromarray(colors).convert(same), Image.Exif(), workdir / "a.tif"
    exif[0x0112] = 6  # on its side
    image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257) if mode == "I;16" else image
    image.save(path, "JPEG" if mode == "JPEG" else "TIFF", exif=exif)
    opened = Image.open(io.BytesIO(path.read_bytes()))  # by name, Pillow 13 damages an uncompressed TIFF on its side
    opened = opened.convert(mode) if mode in ("PA", "La") else opened
    size, model = opened.size, load(trained, device="cpu")
    upright = image.transpose(Image.Transpose.ROTATE_270)
    inputs = model.preprocess([path, opened, opened, *([upright] if mode != "JPEG" else [])])
    levels = 0.03 if mode == "JPEG" else 0  # files of JPEG are decoded as grey
    assert torch.allclose(inputs, inputs[:1].expand_as(inputs), atol=levels)
    assert opened.size == size


def test_evaluate_gives_what_eval_writes_and_writes_nothing(run: Any, trained: Path) -> None:

    before = sorted(trained.rglob("*"))
    found = evaluate(trained, "split=val")
    assert sorted(trained.rglob("*")) == before
    assert run("eval", f"ckpt_path={trained}", "split=val").status == 0
    assert json.loads((trained / "eval_val.json").read_text()) == json.loads(json.dumps(found))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: compose("epoch=1"), "epoch"),
        (lambda: train("model=mlp", "epochs=-1"), "epochs"),
        (lambda: load("nowhere"), "ckpt_path"),
        (lambda: evaluate("nowhere"), "ckpt_path"),
        (lambda: compose("seed=0,1", "sweep=seeds"), "seed: has several values"),
        (lambda: compose(config_dir="nowhere"), "nowhere"),
        (lambda: train({"model": "mlp"}), "not a dict"),  # type: ignore[arg-type]
        (lambda: train(["model=mlp"]), "not a list"),  # type: ignore[arg-type]
        (lambda: train(compose(), "model=mlp"), "not a Train"),
        (lambda: train(compose(), config_dir="conf"), "config_dir: has no effect"),
        (lambda: train("--multirun", "seed=0,1"), "a loop over train"),
        (lambda: compose("--help"), "--help is a flag"),
        (lambda: train("dry_run=true"), "dry_run: makes no run"),
        (lambda: load(None), "checkpoint: cannot be None"),  # type: ignore[arg-type]
        (lambda: load(""), "checkpoint: cannot be ''"),
        (lambda: evaluate(compose()), "checkpoint: cannot be a Train"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_raise_an_error_that_names_the_key(workdir: Path, call: Callable[[], Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        call()
    assert not list(workdir.iterdir()), "a mistake leaves no folder behind"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: load(path, "model=small_cnn"), "not those of this model.*\n.*a checkpoint brings its own"),
        (lambda path: load(path, "top_k=3"), "top_k: is a key of the verb predict"),
        (lambda path: load(path, device="gpu"), "device: cannot be 'gpu'"),
        (lambda path: load(path, device=None), "device: cannot be 'None'"),
        (lambda path: load(path).predict(np.zeros((8, 8))), "images: one is float64"),
        (lambda path: load(path).predict(np.zeros((8, 8, 3, 3), dtype="uint8")), "images: one has the shape"),
        (lambda path: load(path).predict(np.zeros((0, 8), dtype="uint8")), "images: one has no pixels"),
        (lambda path: load(path).predict(Image.new("F", (8, 8))), "the image in memory: its pixels are 32-bit numbers"),
        (lambda path: load(path).predict(3), "images: cannot be of type int"),
        (lambda path: load(path).predict(b"png"), "images: cannot be of type bytes"),
        (lambda path: load(path).predict({"a": 1}), "images: cannot be of type dict"),
        (lambda path: load(path).predict([], top_k="two"), "top_k: cannot be two"),
        (lambda path: load(path).preprocess([]), "images: is empty"),
    ],
)
def test_mistakes_with_a_trained_model_name_the_argument(trained: Path, call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        call(trained)


def test_python_suggests_the_name_that_the_package_has() -> None:
    with pytest.raises(AttributeError) as error:
        _ = runner.trian  # type: ignore[attr-defined]
    assert (error.value.name, "train" in dir(error.value.obj)) == ("trian", True)


def test_what_ends_a_run_raises_as_it_is(own_module: Any) -> None:
    own_module("mine", "class Broken:\n    def on_step(self, loop):\n        raise LookupError('mine')\n")
    with pytest.raises(LookupError, match="mine"):
        train(*WORDS, "+callbacks.mine._target_=mine.Broken", "hydra.run.dir=run")
    assert Path("run/summary.json").is_file()


@pytest.mark.extended
def test_a_model_needs_no_package_that_only_trained_it(
    accepted: Any, rejected: Any, workdir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "own").mkdir()
    (workdir / "own/only_here.py").write_text(OWN)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(workdir / "own"))
        words = ("optimizer=sgd", "optimizer._target_=only_here.Optimizer", "loss._target_=only_here.Loss")
        numbers = ("data.normalize.mean=[0.3]", "data.normalize.std=[0.4]")
        own = ("data.dataset._target_=only_here.data", *numbers, "+callbacks.mine._target_=only_here.Callback")
        result = train(*WORDS, *words, *own, "epochs=1", "hydra.run.dir=run")
    sys.modules.pop("only_here")
    for words in (
        ("predict", f"input={pictures}"),
        ("export",),
        ("inspect", "what=layers"),
        ("eval", "data=digits", "loss=cross_entropy"),
    ):
        accepted(words[0], "ckpt_path=run", *words[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(result.directory).predict(pictures)) == 3
    for words in (("predict", "input=test"), ("eval",), ("inspect",)):
        refused = rejected(words[0], "ckpt_path=run", *words[1:])
        assert "data.dataset._target_: 'only_here.data' comes from a file" in refused.err
        assert "optimizer" not in refused.err
    assert "only_here" not in sys.modules, "nobody imported it"


def test_threads_compose_and_load_side_by_side(trained: Path) -> None:
    def use(number: int) -> tuple[int, int]:
        return compose(f"seed={number}").seed, load(trained).step

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(use, range(8)))
    assert [seed for seed, _ in found] == list(range(8))
    assert len({step for _, step in found}) == 1


def test_what_training_sets_for_the_process_is_as_it_was_afterwards(workdir: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def switches() -> tuple[Any, ...]:
        cudnn = torch.backends.cudnn
        own = (torch.get_num_threads(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision())
        return *own, torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, dict(os.environ)

    threads, before = torch.get_num_threads(), os.environ.get("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("HYDRA_FULL_ERROR", before)
    torch.set_num_threads(2)
    try:
        found = switches()
        train(*WORDS, "deterministic=true", "detect_anomaly=true", "max_steps=1", "evaluate.test=false")
        assert switches() == found
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["${seed}", "a\\b", "it's", "a\\'b", "a=b,c"])
def test_a_checkpoint_is_named_by_its_path_whatever_is_in_it(trained: Path, workdir: Path, name: str) -> None:
    (workdir / name).symlink_to(trained.absolute())
    assert load(name).step == load(trained).step


@pytest.mark.parametrize("use", [load, evaluate, lambda path: train(f"ckpt_path={path}")])
def test_a_path_that_no_system_takes_is_a_mistake(use: Callable[[str], Any]) -> None:
    with pytest.raises(UserError, match="too long"):
        use("x" * 5000)


def test_the_code_of_the_page_runs(workdir: Path) -> None:
    page = (DOCS / "howto" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    runs_that_ended_early.lay_down(workdir / "outputs" / "digits")
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["scores"]["metrics"]["accuracy"] > 0.5
    assert names["found"].table.rows
    statuses = {run.status for run in names["runs"]("outputs/**")}
    assert statuses == {"finished", "pruned", "failed", "died"}
    names["runs"]("outputs/**").to_pandas()


@pytest.mark.extended
def test_the_notebook_runs(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(DOCS / "tutorial" / "first_model.ipynb", as_version=4)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    runs_that_ended_early.lay_down(workdir / "outputs" / "digits")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own packages
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(workdir)}}).execute()
    assert list((workdir / "outputs/digits").glob("*/checkpoints/best.safetensors"))
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    *said, shown = outputs["result = train(config)\nresult"]
    text = "".join(part.text for part in said)
    assert "epoch 1/3  step 20/60  [val]  loss " in text
    assert "[test]  weights of step " in text
    assert "<th style='text-align:left'>val/accuracy</th>" in shown.data["text/html"]
    assert "val/accuracy" in outputs['runs("outputs/digits")'][0].data["text/html"]
