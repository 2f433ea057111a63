"""`task=FILE.py:CLASS` trains a class with the data and the model of its file, as the words that it stands for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some
from extras import needs

from runner.base.errors import UserError
from runner.config.task_file import with_task_file

FILE = """
import torch
from sklearn.datasets import load_digits

def data(samples: int = 96):
    return torch.from_numpy(load_digits().data[:samples] / 16).float()

class model(torch.nn.Linear):
    def __init__(self, width: int = 4):
        super().__init__(64, width)

class Base:
    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def training_step(self, modules, batch):
        return self.factor * modules["model"](batch).square().mean()

class Short(Base):
    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}

    def predict_step(self, modules, batch):
        return {"code": modules["model"](batch)}

class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(17, 3)

    def forward(self, tokens, mask, scale: float = 1.0):
        return {"sum": (self.embed(tokens) * mask[..., None]).sum(1), "twice": 2 * tokens}

def texts():
    return [{"label": row.sum(), "mask": row > 3, "tokens": row.long()} for row in torch.from_numpy(load_digits().data[:40])]

class OfTexts:
    def training_step(self, modules, batch):
        return modules["model"](batch["tokens"], batch["mask"])["sum"].square().mean()

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}

class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)

    def forward(self, one, other):
        return self.layer(one), self.layer(other)

class OfPairs(Short):
    def training_step(self, modules, batch):
        return modules["model"](batch, batch + 1)[0].square().mean()

    def predict_step(self, modules, batch):
        return {}

    def export_inputs(self, batch):
        return batch, batch + 1

class WithoutInputs(OfPairs):
    export_inputs = None

class Mean(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 3)

    def forward(self, vectors):
        return super().forward(vectors).mean()

class OfMean(Short):
    def training_step(self, modules, batch):
        return modules["model"](batch)

class Other:
    pass
"""
QUICK = ("epochs=2", "data.batch_size=16", "logger=none", "scheduler=constant")


@pytest.fixture(autouse=True)
def folder(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workdir / "deep").mkdir()
    for path in ("short.py", "deep/short.py"):
        (workdir / path).write_text(FILE)
    step = "class T(T):\n    def training_step(self): ...\n"
    (workdir / "named.py").write_text(f"from other import T, model\nclass Views: ...\ndata = Views\n{step}")
    (workdir / "both.py").write_text(f"from other import T\nclass A: ...\nclass B: ...\ndata, model = A, B\n{step}")
    (workdir / "typed.py").write_text(
        f"from other import T, A\ndefaults: list[str] = ['epochs=2']\nmodel: type = A\n{step}"
    )
    defaults = 'defaults = ["optimizer=sgd", "optimizer.lr=1", "epochs=2", "loss=mse", "~scheduler"]\n'
    (workdir / "short_of.py").write_text(f"from other import T\n{defaults}{step}")
    (workdir / "wrong.py").write_text(f"defaults = {{'epochs': 2}}\n{step}")
    (workdir / "made.py").write_text(f"data = [1, 2]\n{step}")
    (workdir / "one.py").write_text("class A:\n    def training_step(self): ...\nclass B(A): ...\n")
    monkeypatch.syspath_prepend(str(workdir))
    for name in ("short", "deep", "deep.short"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return workdir


def test_one_file_trains_resumes_to_the_bit_and_predicts(
    train: Callable[..., Any], accepted: Any, rejected: Any, folder: Path
) -> None:
    words = ("task=short.py:Short", *QUICK, "task.factor=2", "model.width=3", "data.dataset.samples=64")
    whole = train(*words)
    assert whole.directory.parent.name == "short"
    assert train(*words, "task.factor=1").summary["weights_sha256"] != whole.summary["weights_sha256"]
    part = train(*words, "max_steps=3", "name=part")
    # Who names the file runs it; who names a run alone has to trust its code
    assert "'short.Short' comes from a file" in rejected("train", f"ckpt_path={part.directory}", "max_steps=null").err
    resumed = train("task=short.py:Short", f"ckpt_path={part.directory}", "max_steps=null")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    accepted("predict", "task=short.py:Short", "ckpt_path=last", "input=test", "output=codes.csv")
    assert len((folder / "codes.csv").read_text().splitlines()) == 14


def test_the_header_names_a_function_that_the_file_gives_another_name(accepted: Any, folder: Path) -> None:
    aliases = "def small_net():\n    return torch.nn.Linear(64, 4)\nmodel = small_net\n"
    (folder / "aliased.py").write_text(f"{FILE}\n{aliases}")
    shown = accepted("train", "task=aliased.py:Short", *QUICK, "max_steps=1", "evaluate.every_epochs=null").out
    assert "small_net, 260 parameters" in shown
    (folder / "unnamed.py").write_text("import torch\nnet = lambda: torch.nn.Linear(64, 4)\n")
    words = ("model=null", "model._target_=unnamed.net", "trust=[short,unnamed]")
    shown = accepted("train", "task=short.py:Short", *words, *QUICK, "max_steps=1", "evaluate.every_epochs=null").out
    assert " net, 260 parameters" in shown


@pytest.mark.parametrize(("words", "expected"), [
    (["task=short.py:Base"], "task=null task._target_=short.Base name=short trust=[short] loss=none model=null "
     "model._target_=short.model data=own data.dataset._target_=short.data transform=none data.images=[]"),
    (["task=deep/short.py:Short", "data=digits", "name=here", "trust=[deep,mine]", "model=mlp"],
     "task=null task._target_=deep.short.Short loss=none data=digits name=here trust=[deep,mine] model=mlp"),
    (["task=short.py:Short", "loss=mse", "transform=standard", "data.images=[image]"],
     "task=null task._target_=short.Short name=short trust=[short] model=null model._target_=short.model data=own "
     "data.dataset._target_=short.data loss=mse transform=standard data.images=[image]"),
    (["task=short.py:Other", "data=digits", "model=mlp"],
     "task=null task._target_=short.Other name=short trust=[short] data=digits model=mlp"),
    (["ckpt_path=last", "task=one.py"], "ckpt_path=last task._target_=one.B name=one trust=[one]"),
    (["task=both.py"], "task=null task._target_=both.T name=both trust=[both] loss=none model=null model._target_=both.model "
     "data=own data.dataset._target_=both.data transform=none data.images=[]"),
    (["task=typed.py"], "task=null task._target_=typed.T name=typed trust=[typed] loss=none model=null "
     "model._target_=typed.model epochs=2"),
    (["task=short_of.py", "epochs=3"], "task=null task._target_=short_of.T name=short_of trust=[short_of] "
     "optimizer=sgd optimizer.lr=1 loss=mse ~scheduler epochs=3"),
    (["task=short_of.py", "optimizer=adam"], "task=null task._target_=short_of.T name=short_of trust=[short_of] "
     "epochs=2 loss=mse ~scheduler optimizer=adam"),
    (["task=short_of.py", "ckpt_path=last"], "task._target_=short_of.T name=short_of trust=[short_of] ckpt_path=last"),
    (["task=named.py", "ckpt_path=null"], "task=null task._target_=named.T name=named trust=[named] loss=none model=null "
     "model._target_=named.model data=own data.dataset._target_=named.data transform=none data.images=[] ckpt_path=null"),
    (["task=classification", "task._target_=a.py"], "task=classification task._target_=a.py"),
])  # fmt: skip
def test_the_word_stands_for_what_the_file_has_and_the_others_do_not_say(words: list[str], expected: str) -> None:
    assert with_task_file(words) == expected.split()


@pytest.mark.parametrize(("word", "reason"), [
    ("task=short.py:Shrt", "did you mean 'Short'"),
    ("task=two.py", "task=two.py:B, task=two.py:C"),
    ("task=absent.py", "No such file"),
    ("task=broken.py", "broken.py, line 1"),
    ("task=../short.py", "below the current folder"),
    ("task=my-task.py", "names that Python can import"),
    ("task=made.py", "'data' of made.py is a value"),
    ("task=wrong.py", "'defaults' of wrong.py is not a list of words"),
])  # fmt: skip
def test_a_file_that_cannot_be_meant_is_a_sentence(word: str, reason: str, rejected: Any, folder: Path) -> None:
    (folder / "two.py").write_text("class A:\n    def training_step(self): ...\nclass B(A): ...\nclass C(A): ...\n")
    (folder / "broken.py").write_text("class A(:\n")
    err = rejected("train", word).err
    assert err.startswith("error: task:")
    assert reason in err
    with pytest.raises(UserError):
        with_task_file([word])


TEXTS = ("task=short.py:OfTexts", "model._target_=short.Tokens", "data.dataset._target_=short.texts")
PAIRS = ("model._target_=short.Pairs",)


@needs("export")
@pytest.mark.parametrize(("words", "inputs", "outputs"), some([
    (("task=short.py:Short",), {"input": [64]}, {"outputs": [4]}),
    (TEXTS, {"tokens": [64], "mask": [64]}, {"sum": [3], "twice": [64]}),
    (("task=short.py:OfPairs", *PAIRS), {"one": [64], "other": [64]}, {"outputs_0": [3], "outputs_1": [3]}),
], 1, several=True))  # fmt: skip
def test_any_tensors_are_exported_by_name(
    words: tuple[str, ...], inputs: Any, outputs: Any, train: Callable[..., Any], printed: Any
) -> None:
    directory = train(*QUICK, *words).directory
    formats = "format=[safetensors,torch_export,onnx,torchscript]"
    record = printed("export", words[0], f"ckpt_path={directory}", formats, "batch_sizes=[1,5]")
    found = [record[name] if isinstance(record[name], list) else [record[name]] for name in ("input", "output")]
    assert [{each["name"]: each["shape"][1:] for each in tensors} for tensors in found] == [inputs, outputs]
    assert {(row["format"], row["batch_size"]) for row in record["comparison"]} == {
        (name, size) for name in ("safetensors", "torch_export", "onnx", "torchscript") for size in (1, 5)
    }
    assert max(row["max_rel"] for row in record["comparison"]) < 1e-5


def test_a_run_that_is_never_evaluated_needs_no_scalar(train: Callable[..., Any], folder: Path) -> None:
    (folder / "short.py").write_text(FILE + "\nclass Best(Base):\n    monitor, mode = 'val/best', 'max'\n")
    words = ("task=short.py:Best", "evaluate.every_epochs=null", "evaluate.test=false")
    assert train(*QUICK, *words).summary["best"] is None


@pytest.mark.parametrize(("words", "given", "key", "reason"), [
    (("task=short.py:WithoutInputs", *PAIRS), (), "task", "forward takes one, other, and a batch has Tensor one"),
    (("task=short.py:OfMean", "model._target_=short.Mean"), (), "model", "returns Tensor () as outputs for 8 samples"),
    (("task=short.py:Short",), ("include_preprocessing=true",), "include_preprocessing", "one field of images"),
])  # fmt: skip
def test_what_cannot_be_exported_is_a_sentence(
    words: tuple[str, ...], given: tuple[str, ...], key: str, reason: str, train: Callable[..., Any], rejected: Any
) -> None:
    err = rejected("export", words[0], f"ckpt_path={train(*QUICK, *words).directory}", *given).err
    assert err.startswith(f"error: {key}: ")
    assert reason in err
