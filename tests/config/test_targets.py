"""Components: paths resolved, arguments checked without a call, objects built, and untrusted ones refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.base.errors import UserError
from runner.config.schema.sections import OptimizerExtras
from runner.config.sources import shipped
from runner.config.targets import _refused, bind, build, called, extras_of, resolve, targets_in
from runner.config.untrusted import refusal

PACKAGE = '''
"""A package of the user's."""

import os
from typing import Any, Literal

import torch
from torch import Tensor

made = []


class Box:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        made.append(self)


class Typed:
    def __init__(self, width: int, rate: float = 0.1, on: bool = False, name: str | None = None,
                 sizes: list[int] | None = None, kind: Literal["a", "b"] = "a", other: Box | None = None,
                 depth: int = None, pair: tuple[float | Tensor, float | Tensor] = (0.5, 0.9)) -> None:
        if width < 0:
            raise ValueError(f"width must not be negative, got {width}")
        self.width, self.sizes, self.other = width, sizes, other


class Empty:
    pass


class Wants:
    def __init__(self, first, num_classes: int, image_size: tuple[int, int] = (1, 1), extra=None):
        self.first, self.num_classes, self.image_size, self.extra = first, num_classes, image_size, extra


class Scaling:
    def __init__(self, lr_base_batch_size: str = "none") -> None:
        self.lr_base_batch_size = lr_base_batch_size


def breaks():
    raise RuntimeError("inside")


def _hidden():
    return 3


number, mapping = 3, dict
'''


SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


@pytest.fixture
def package(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package on the path, new for each test."""
    name = "package_of_the_user"
    (workdir / f"{name}.py").write_text(PACKAGE)
    (workdir / "broken_package.py").write_text("import no_such_dependency\n")
    (workdir / "raising_package.py").write_text("raise OSError('no such device')\n")
    monkeypatch.syspath_prepend(workdir)
    yield name
    for module in (name, "broken_package", "raising_package"):
        sys.modules.pop(module, None)


# Resolving


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Net", "'Net' is not a dotted path such as my_package.Net"),
        ("", "'' is not a dotted path"),
        ("a..b", "'a..b' is not a dotted path"),
        ("a.b()", r"'a.b\(\)' is not a dotted path"),
        ("no_such_package.Net", r"there is no package 'no_such_package' \(it must be installed"),
        ("tocrh.nn.Linear", "there is no package 'tocrh' .did you mean 'torch'?"),
        ("torch.nn.utlis.rnn", "torch.nn has no 'utlis'; did you mean 'utils'?"),
        ("torch.nn.Liner", "torch.nn has no 'Liner'; did you mean 'Linear'?"),
        ("torch.nm.Linear", "torch has no 'nm'; did you mean"),
        ("torch.nn.Linear.qqqqqqqq", "Linear has no 'qqqqqqqq'"),
        ("broken_package.Net", "importing broken_package failed: ModuleNotFoundError: No module named 'no_such_depen"),
        ("raising_package.Net", "importing raising_package failed: OSError: no such device"),
    ],
)
def test_a_path_that_names_nothing_is_told_with_the_reason(path, message, package):
    with pytest.raises(UserError, match=message):
        resolve(path)


# Binding


FITS: list[dict[str, Any]] = [
    {"width": 1},
    {"width": 1, "rate": 1, "on": True, "name": "x", "sizes": [1, 2], "kind": "b"},
    {"width": 1, "name": None, "sizes": None},
    {"width": 1, "rate": 1e-3},
    {"width": 1, "depth": None, "pair": [0, 0.5]},
    {"width": 1, "pair": [{"_target_": "package_of_the_user.Box", "anything": 3}, 0.5]},
    {"_args_": [1]},
    {"_partial_": True},
    {"width": 1, "other": {"_target_": "package_of_the_user.Box", "anything": 3}},
]
WRONG = [
    ({}, "width", "is missing: package_of_the_user.Typed needs it", ""),
    ({"width": "wide"}, "width", "cannot be wide", "a whole number"),
    ({"width": 1.5}, "width", "cannot be 1.5", "a whole number"),
    ({"width": True}, "width", "cannot be true", "a whole number"),
    ({"width": None}, "width", "cannot be null", "a whole number"),
    ({"width": 1, "rate": "x"}, "rate", "cannot be x", "a number"),
    ({"width": 1, "on": "maybe"}, "on", "cannot be maybe", "true or false"),
    ({"width": 1, "kind": "c"}, "kind", "cannot be c", "a or b"),
    ({"width": 1, "sizes": ["x"]}, "sizes", "cannot be [x]", "a list, each item a whole number or null"),
    ({"width": 1, "depth": "x"}, "depth", "cannot be x", "a whole number"),
    ({"width": 1, "pair": [0.5]}, "pair", "cannot be [0.5]", "a list of 2: a number, a number"),
    ({"width": 1, "pair": ["x", 0.5]}, "pair", "cannot be [x, 0.5]", "a list of 2: a number, a number"),
    ({"width": 1, "nmae": 1}, "nmae", "is not an argument of package_of_the_user.Typed", None),
    ({"width": 1, "_recursive_": False}, "_recursive_", "is not supported", "_target_, _partial_, _args_"),
]


@pytest.mark.parametrize("row", [*((arguments,) for arguments in FITS), *WRONG], ids=lambda row: str(row[0]))
def test_an_argument_that_does_not_fit_is_named_before_anything_is_built(row: tuple[Any, ...], package: str) -> None:
    found = bind("model", {"_target_": f"{package}.Typed"} | row[0])
    assert sys.modules[package].made == []
    if not row[1:]:
        assert found == []
        return
    _, key, message, allowed = row
    [problem] = found
    assert (problem.key, problem.message, problem.nearest) == (f"model.{key}", message, "name" * (key == "nmae"))
    assert allowed in (None, problem.allowed)


INNER = {"_target_": "package_of_the_user.Typed", "width": "x"}


@pytest.mark.parametrize(
    ("name", "node", "options", "keys"),
    [
        ("Typed", {"rate": "x", "nmae": 1}, {}, "rate nmae width"),  # all of them
        ("Wants", {}, {}, "first num_classes"),
        ("Wants", {}, {"facts": ("num_classes", "unused"), "positional": 1}, ""),
        ("Wants", {"num_classes": None}, {"facts": ("num_classes",), "positional": 1}, ""),
        ("Wants", {"num_classes": "x"}, {"facts": ("num_classes",), "positional": 1}, "num_classes"),
        ("Box", {"one": INNER, "many": [INNER, {"_target_": "no.Net"}]}, {}, "one.width many.0.width many.1._target_"),
        ("number", {}, {}, "_target_"),  # is not callable
        ("Empty", {"width": 3}, {}, "width"),
        ("mapping", {"a": 1}, {}, ""),  # a built-in without a readable signature
    ],
    ids=str,
)
def test_each_argument_that_does_not_fit_is_named_with_its_whole_key(name, node, options, keys, package):
    found = bind("model", {"_target_": f"{package}.{name}"} | node, **options)
    assert {problem.key for problem in found} == {f"model.{key}" for key in keys.split()}


# Building


def test_a_null_that_another_target_has_left_is_left_out(package):
    assert build("model", {"_target_": f"{package}.Typed", "width": 3, "weights": None}).width == 3
    assert vars(build("model", {"_target_": f"{package}.Empty", "weights": None})) == {}
    assert build("model", {"_target_": f"{package}.Box", "weights": None}).kwargs == {"weights": None}


def test_facts_that_are_null_are_not_given_to_a_target_that_takes_any_name(package):
    node = {"_target_": f"{package}.Box", "in_channels": None, "width": None}
    assert build("model", node, facts={"in_channels": None, "num_classes": 2}).kwargs == {"width": None}
    teacher = build("task", {"_target_": f"{package}.Box", "teacher": node}, facts={"num_classes": 2}).kwargs["teacher"]
    assert teacher.kwargs == {"width": None}


def test_nested_components_are_built_first_in_mappings_and_lists(package):
    inner = {"_target_": f"{package}.Typed", "width": 1, "sizes": [1, 2]}
    node = {"_target_": f"{package}.Box", "one": inner, "many": [inner, 5], "deep": {"er": inner}}
    before = repr(node)
    given = build("model", node).kwargs
    made = [given["one"], given["many"][0], given["deep"]["er"]]
    assert [(type(each).__name__, each.width, each.sizes) for each in made] == [("Typed", 1, [1, 2])] * 3
    assert (given["many"][1], repr(node)) == (5, before)


def test_partial_components_wait_for_the_rest_of_their_arguments(package):
    made = build("model", {"_target_": f"{package}.Typed", "_partial_": True, "sizes": [1]})
    assert isinstance(made, functools.partial)
    assert (made(width=2).width, made(width=2).sizes) == (2, [1])


def test_arguments_by_position_come_after_those_of_the_program(package):
    made = build("model", {"_target_": f"{package}.Box", "_args_": [2, 3], "a": 4}, 1)
    assert (made.args, made.kwargs) == ((1, 2, 3), {"a": 4})


def test_facts_fill_in_what_the_signature_names_and_the_config_leaves_open(package):
    facts = {"num_classes": 10, "image_size": (8, 8), "unknown": 1}
    node = {"_target_": f"{package}.Wants", "image_size": [4, 4], "num_classes": None}
    made = vars(build("model", node, "x", facts=facts))
    assert made == {"first": "x", "num_classes": 10, "image_size": [4, 4], "extra": None}


@pytest.mark.parametrize(
    ("name", "node", "kind", "says"),
    [
        ("Typed", {"width": -1}, UserError, r"^model\.width: .*\.Typed refuses its arguments: width must not be negat"),
        ("Box", {"a": [0, INNER | {"width": -2}]}, UserError, r"^model\.a\.1\.width: .*\.Typed refuses .*got -2"),
        ("breaks", {}, RuntimeError, "inside"),  # a failure of the target stays what it is
    ],
)
def test_a_refusal_of_the_target_is_a_sentence_with_its_key(name, node, kind, says, package):
    with pytest.raises(kind, match=says):
        build("model", {"_target_": f"{package}.{name}"} | node)


def test_every_target_is_found_at_any_depth():
    values = {
        "a": {"_target_": "x.A", "b": [{"_target_": "x.B", "c": {"d": {"_target_": "x.D"}}}]},
        "e": [[{"_target_": 3}]],
    }
    assert dict(targets_in(values)) == {"a": "x.A", "a.b.0": "x.B", "a.b.0.c.d": "x.D", "e.0.0": "3"}


# Keys that the program reads itself


def test_a_component_is_built_without_the_keys_that_the_program_reads():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert build("optimizer", SGD | {"lr_base_batch_size": 64}, weights).defaults["lr"] == 0.1
    assert bind("optimizer", SGD | {"lr_base_batch_size": 64}, positional=1) == []


def test_extras_that_a_config_leaves_out_have_their_defaults():
    assert extras_of("optimizer", SGD) == OptimizerExtras()
    assert extras_of("optimizer", SGD | {"lr_base_batch_size": 64}).lr_base_batch_size == 64


def test_an_argument_of_the_component_itself_is_none_of_the_extras(package):
    own = {"_target_": f"{package}.Scaling", "lr_base_batch_size": "mine"}
    assert build("optimizer", own).lr_base_batch_size == "mine"
    assert bind("optimizer", own) == []
    assert extras_of("optimizer", own) == OptimizerExtras()


# The allow-list for paths that come from files

STRANGE = """
os.system subprocess.run subprocess.Popen builtins.eval builtins.exec builtins.__import__ logging.os.system
shutil.rmtree pickle.loads importlib.import_module functools.partial
runner.config.targets.importlib.import_module runner.config.targets.build runner.config.targets.resolve
runner.base.files.write_json runner.base.files.os.system runner.checkpoint.file.write runner.cli.main
runner.verbs.options.copy runner.data.sources.folders.os.remove runner.data.build.os.system runner.data.build.build
runner.data.sources.torchvision_sets.tarfile.open runner.data.loaders.signal.signal runner.optim.losses.torch.load
runner.models.mlp._private runner.models runner.models.checks.no_such_thing
torch.load torch.save torch.hub.load torch.os.system torch.jit.load torch.compile torch.ops.load_library
torch.serialization.os.system torch.utils.cpp_extension.load torch.package.PackageImporter torch.nn.functional.relu
torch.multiprocessing.spawn torch.utils.data.DataLoader torch.nn.Module.load_state_dict
torch.nn.modules.module._addindent torch.nn.Linear.__init__.__globals__ torch.nn.Linear.__class__
torchvision.io.write_file torchvision.io.write_png torchvision.datasets.utils.download_url
torchvision.datasets.utils.extract_archive torchvision.models.get_model_weights torchvision.models.list_models
torchvision.transforms.functional.to_tensor torchmetrics.os.system runner.tracking.loggers.Csv.open
runner.tracking.loggers.JsonLines.log torch.nn.Module.load_state_dict
os torch nothing_at_all.Net
torch.utils.data.datapipes.iter.RoutedDecoder torch.utils.data.datapipes.iter.FileOpener torch.fx.GraphModule
torch.jit.ScriptModule torch.distributed.nn.RemoteModule torch.nn.parallel.DistributedDataParallel
torchvision.datasets.LSUN torchvision.datasets.LSUNClass runner.data.build.read_data runner.data.workers.WorkerLoader
runner.data.sources.shards.MANIFEST torch.float32
"""
USUAL = """
runner.models.mlp.MLP runner.models.small_cnn.SmallCNN runner.models.torchvision_zoo.classifier
runner.data.sources.digits.digits runner.data.sources.synthetic.synthetic runner.data.transforms.augment.RandomShift
runner.data.transforms.mixing.Mixup runner.data.transforms.color_jitter.ColorJitter
runner.data.transforms.resized_crop.RandomResizedCrop
runner.optim.muon.Muon runner.optim.losses.CrossEntropy runner.optim.schedules.OneCycle
runner.tasks.classification.Classification runner.engine.callbacks.EarlyStopping runner.tracking.loggers.TensorBoard
torch.nn.Linear torch.nn.Sequential torch.nn.CrossEntropyLoss torch.optim.SGD torch.optim.AdamW
torch.optim.lr_scheduler.StepLR torch.utils.data.TensorDataset
torchvision.models.resnet18 torchvision.models.get_model torchvision.models.vit_b_16 torchvision.models.resnet.ResNet
torchvision.datasets.MNIST torchvision.datasets.FakeData torchvision.datasets.ImageFolder
torchvision.transforms.v2.RandomCrop torchvision.transforms.v2.Compose torchvision.transforms.RandomHorizontalFlip
torchvision.transforms.Compose torchvision.transforms.ToTensor
torchmetrics.Accuracy torchmetrics.F1Score torchmetrics.classification.MulticlassAccuracy
"""


@pytest.mark.parametrize("path", [*STRANGE.split(), *USUAL.split()])
def test_a_file_may_name_what_is_usual_and_nothing_strange(path):
    assert bool(refusal(path, [])) == (path in STRANGE.split())


def test_everything_that_the_shipped_options_build_may_be_named_by_a_file():
    files = [file for file in shipped().rglob("*.yaml") if "launcher" not in file.parts]
    found = {path for file in files for _, path in targets_in(yaml.safe_load(file.read_text()))}
    found -= {"???"}  # what data=own asks the user for
    assert len(found) > 30
    assert {path: reason for path in found if (reason := refusal(path, []))} == {}


OWN = "package_of_the_user"


@pytest.mark.parametrize(
    ("path", "trust", "reason"),
    [
        ("runner.config.targets.importlib.import_module", "", "resolves to importlib.import_module"),
        ("torch.os.system", "", "resolves to posix.system"),
        (f"{OWN}.Box", "", "its package is not trusted"),
        (f"{OWN}.Box", OWN, ""),
        (f"{OWN}.os.system", OWN, "resolves to posix.system"),
        (f"{OWN}.torch.load", OWN, "resolves to torch.serialization.load"),
        (f"{OWN}._hidden", OWN, "private"),
        (f"{OWN}_2.Box", OWN, "its package is not trusted"),
        ("torch.load", OWN, "not on the list"),
        ("large_package.nets.Net", "large_package.nets", ""),
        ("large_package.top", "large_package.nets", "its package is not trusted"),
    ],
)
def test_trust_opens_what_it_names_and_nothing_that_it_imports(path, trust, reason, package, workdir):
    (workdir / "large_package").mkdir()
    (workdir / "large_package" / "__init__.py").write_text("def top(): ...\n")
    (workdir / "large_package" / "nets.py").write_text("class Net: ...\n")
    said = refusal(path, [trust] * bool(trust))
    assert reason in said
    assert bool(said) == bool(reason)


@pytest.mark.parametrize("trust", [[], ["another_package"], ["untrusted"], ["untrusted_package.nets"], ["torch"]])
def test_a_untrusteds_module_is_not_even_imported(trust, workdir, monkeypatch):
    (workdir / "untrusted_package.py").write_text("open('imported', 'w').close()\n\n\nclass Net: ...\n")
    monkeypatch.syspath_prepend(workdir)
    assert "its package is not trusted" in refusal("untrusted_package.Net", trust)
    assert not Path("imported").exists()
    assert "untrusted_package" not in sys.modules


def test_what_only_behaves_like_a_mapping_is_not_built() -> None:
    with pytest.raises(UserError, match="not a mapping read from a config"):
        build("model", torch.nn.ParameterDict([("_target_", "os.system"), ("_args_", ["true"])]))


@pytest.mark.parametrize(
    ("words", "section", "name"),
    [
        ((), "model", "SmallCNN"),
        (("model=torchvision",), "model", "resnet18 (torchvision)"),
        (("model=timm", "model.name=vit_tiny_patch16_224"), "model", "vit_tiny_patch16_224 (timm)"),
        (("scheduler=torch", "scheduler.name=StepLR"), "scheduler", "StepLR"),
        (("model._target_=my_nets.classifier", "+model.name=wide"), "model", "classifier"),
    ],
)
def test_a_component_is_called_what_people_call_it(compose, words, section, name):
    node = compose(*words).values[section]
    assert called(node["_target_"], node.get("name")) == name


@pytest.mark.parametrize(
    ("reason", "arguments", "argument"),
    [
        ("Invalid learning rate: -1", {"lr": -1, "eps": -1}, "lr"),
        ("Nesterov momentum requires a momentum", {"momentum": 0, "nesterov": True}, "nesterov"),
        ("weight decay must not be negative", {"weight": 1, "weight_decay": -2}, "weight_decay"),
        ("the widths differ", {"width": 3}, ""),
        ("no target named so", {"inner": {"_target_": "a.B", "size": 3}}, ""),
        ("size is 3", {"inner": {"size": 3}}, "inner.size"),
    ],
)
def test_the_argument_that_an_error_is_about(reason, arguments, argument):
    assert _refused(reason, arguments) == argument
