"""`new` writes parts that train at once and pass their own tests, and never writes over anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from runner.verbs.new import _camel, _snake

SMOKE = ("threads=1", "logger=none", "log.progress=false", "log.curves=false", "debug=smoke", "device=cpu")
PARTS = {
    "model": ("MyNet", "model=my_net", "MyNet, "),
    "data": ("MyImages", "data=my_images", "my_images, 1x16x16, 4 classes"),
    "task": ("MyTask", "task=my_task.py", "my_task"),
    "callback": ("MyCallback", "callbacks=my_callback", "weight_norm"),
}


@pytest.fixture
def own(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder, importable as `python -m` has it."""
    monkeypatch.syspath_prepend(str(workdir))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_package", "mine", "my_task")]:
        monkeypatch.delitem(sys.modules, name)
    return workdir


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def own_tests() -> None:
    """Run the tests that were written, in the current folder."""
    done = forked.run(
        ["-q", "-p", "no:cacheprovider", "--assert=plain"], script=str(Path(pytest.__file__).with_name("__main__.py"))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "warning" not in done.stdout


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_written_trains_with_the_command_that_is_told(kind: str, own: Path, accepted: Any) -> None:
    name, option, sign = PARTS[kind]
    written = accepted("new", kind, name)
    told, _, commands = written.out.partition("\n\ntry:\n")
    files = [line.strip() for line in told.splitlines()[1:]]
    assert set(content(own)) == set(files)
    first = commands.splitlines()[0].split()
    assert first[:4] == ["python", "-m", "runner", "train"]
    assert first[-1] == option
    result = accepted(*first[3:], *SMOKE, "log.every_steps=1")
    assert sign in result.out + (result.directory / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_everything_that_is_written_passes_its_own_tests(own: Path, run: Any) -> None:
    for kind, (name, _, _) in PARTS.items():
        assert run("new", kind, name).status == 0
    own_tests()


@pytest.mark.slow
@pytest.mark.extended
def test_a_project_trains_and_passes_its_own_tests(own: Path, accepted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = accepted("new", "project", "mine")
    assert "cd mine" in written.out
    assert "python -m runner train --config-dir conf experiment=mine" in written.out
    assert {path.split("/")[0] for path in content(own)} == {"mine"}
    monkeypatch.chdir("mine")
    own_tests()


def test_a_project_grows_with_its_own_package_and_options(own: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("new", "project", "mine").status == 0
    monkeypatch.chdir(own / "mine")
    monkeypatch.syspath_prepend(str(own / "mine"))
    before = content(own / "mine")
    assert run("new", "model", "Another").status == 0
    added = set(content(own / "mine")) - set(before)
    assert added == {"mine/another.py", "conf/model/another.yaml", "tests/test_another.py"}
    listed = run("list", "--config-dir", "conf", "model")
    assert "another" in listed.out
    assert "Another: two convolutions" in listed.out


def test_package_and_folder_can_be_named(own: Path, run: Any) -> None:
    assert run("new", "model", "wide_net", "--package", "mine", "--config-dir=options/here").status == 0
    assert set(content(own)) == {
        "mine/__init__.py", "mine/wide_net.py", "options/here/model/wide_net.yaml", "tests/test_wide_net.py",
    }  # fmt: skip
    option = yaml.safe_load((own / "options/here/model/wide_net.yaml").read_text())
    assert option["_target_"] == "mine.wide_net.WideNet"
    assert "class WideNet(nn.Module)" in (own / "mine/wide_net.py").read_text()


@pytest.mark.parametrize("path", ["my_package/my_net.py", "my_conf/model/my_net.yaml", "tests/test_my_net.py"])
def test_nothing_is_overwritten_and_then_nothing_is_written(path: str, own: Path, rejected: Any) -> None:
    (own / path).parent.mkdir(parents=True)
    (own / path).write_text("mine\n")
    result = rejected("new", "model", "MyNet")
    assert f"new: {path} already exists, and nothing is overwritten" in result.err
    assert content(own) == {path: b"mine\n"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("modle", "MyNet"), "new: cannot create a 'modle'; did you mean 'model'?"),
        (("model",), "takes a kind and a name, got 1 word\n    allowed: model NAME"),
        (("model", "A", "B"), "got 3 words"),
        (("model", "3d"), "'3d' cannot be the name of a class"),
        (("model", "my-net"), "'my-net' cannot be the name of a class"),
        (("model", "class"), "'class' cannot be the name of a class"),
        (("model", "../x"), "'../x' cannot be the name of a class"),
        (("data", "on"), "'on' cannot be the name of a class"),
        (("model", "Mlp"), "model=mlp already exists, in "),
        (("callback", "early_stopping"), "callbacks=early_stopping already exists"),
        (("project", "torch"), "it would hide another package 'torch'"),
        (("project", "json"), "it would hide another package 'json'"),
        (("project", "my-project"), "'my-project' cannot be the name of a package"),
        (("project", "mine", "--package", "x"), "a project has its own package and folder of options"),
        (("model", "A", "--package", "numpy"), "it would hide another package 'numpy'"),
        (("model", "A", "--config-dir", "../x"), "--config-dir cannot be '../x'"),
        (("model", "A", "--config-dir"), "--config-dir needs a folder"),
        (("model", "A", "--pakage=x"), "unknown flag '--pakage'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_name_that_cannot_be_used_is_told(words: tuple[str, ...], message: str, own: Path, rejected: Any) -> None:
    result = rejected("new", *words)
    assert f"error: new: {message}" in result.err or message in result.err
    assert content(own) == {}


def test_a_folder_that_is_there_is_no_place_for_a_project(own: Path, rejected: Any) -> None:
    (own / "mine").mkdir()
    result = rejected("new", "project", "mine")
    assert "mine already exists" in result.err
    assert content(own) == {}


@pytest.mark.parametrize(
    ("name", "option", "written"),
    [
        ("MyNet", "my_net", "MyNet"),
        ("my_net", "my_net", "MyNet"),
        ("ResNet18", "res_net18", "ResNet18"),
        ("VGG", "vgg", "VGG"),
        ("MyCNNModel", "my_cnn_model", "MyCNNModel"),
        ("net", "net", "Net"),
    ],
)
def test_both_spellings_of_a_name_are_understood(name: str, option: str, written: str) -> None:
    assert (_snake(name), _camel(name)) == (option, written)


def test_torch_is_not_imported(workdir: Path) -> None:
    code = "import sys, runner.cli; runner.cli.main(['new', 'model', 'MyNet']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=workdir)
    assert not {"torch", "hydra", "omegaconf", "pydantic", "numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("missing", [True, False])
def test_the_commands_say_how_to_get_what_runs_the_tests(
    missing: bool, workdir: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if missing and name == "pytest" else find(name, *rest)
    )
    last = run("new", "model", "MyNet").out.splitlines()[-2:]
    assert ("pip install pytest" in last[0], "python -m pytest" in last[1]) == (missing, True)
