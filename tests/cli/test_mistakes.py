"""Every kind of wrong input is answered by a sentence and exit status 2, never by a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from PIL import Image

from runner.checkpoint import file as checkpoint_file
from runner.engine.errors import Diverged

IMAGES = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "data=image_folder", "data.root=images",
)  # fmt: skip
IMAGES += ("data.image_size=8", "data.batch_size=4", "model=small_cnn", "model.width=4", "epochs=1")


@dataclass(frozen=True)
class Place:
    """Where a mistake is made: an empty working folder, and the directory of a run that went well."""

    folder: Path
    trained: Path
    patch: pytest.MonkeyPatch


@dataclass(frozen=True)
class Mistake:
    """A call, what is prepared for it, and what standard error must say, in any order."""

    name: str
    words: tuple[str, ...]
    says: tuple[str, ...]
    prepare: Callable[[Place], None] = lambda place: None
    tiny: bool = True


def images(place: Place, sizes: tuple[tuple[int, int], ...] = ((8, 8),)) -> None:
    for name in ("cat", "dog"):
        folder = place.folder / "images" / name
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", sizes[number % len(sizes)], (number * 20, 10, 200)).save(folder / f"{number}.png")


def truncated_images(place: Place) -> None:
    images(place)
    for path in (place.folder / "images" / "cat").glob("[1-5].png"):
        path.write_bytes(path.read_bytes()[:40])


def an_empty_class(place: Place) -> None:
    images(place)
    (place.folder / "images" / "emu").mkdir()


def an_odd_package(place: Place) -> None:
    text = "from torch import nn\n\n\nclass Odd(nn.Identity):\n    pass\n"
    text += "\n\nclass Wrong:\n    def on_step(self):\n        pass\n"
    text += "\n\nclass Misspelt:\n    def on_stepp(self, loop):\n        pass\n"
    text += "\n\nclass HalfMisspelt(Misspelt):\n    def on_start(self, loop):\n        pass\n"
    (place.folder / "odd_package.py").write_text(text)
    place.patch.syspath_prepend(place.folder)


def a_package_with_a_signature(place: Place) -> None:
    (place.folder / "odd_package.py").write_text("class Odd:\n    def __init__(self, num_classes):\n        pass\n")
    place.patch.syspath_prepend(place.folder)
    place.patch.delitem(sys.modules, "odd_package", raising=False)


def offline(place: Place) -> None:
    from runner.data.sources import fetch

    def refuse(*_: object, **__: object) -> None:
        raise URLError("connection refused")

    place.patch.setattr(fetch, "urlopen", refuse)


def no_cuda(place: Place) -> None:
    place.patch.setattr(torch.cuda, "is_available", lambda: False)


def a_file_named_outputs(place: Place) -> None:
    (place.folder / "outputs").write_text("not a folder")


def checkpoint(place: Place, content: bytes) -> None:
    (place.folder / "mine.safetensors").write_bytes(content)


def a_good_checkpoint(place: Place) -> None:
    checkpoint(place, (place.trained / "checkpoints" / "last.safetensors").read_bytes())


def a_truncated_checkpoint(place: Place) -> None:
    content = (place.trained / "checkpoints" / "last.safetensors").read_bytes()
    checkpoint(place, content[: len(content) // 2])


def a_flipped_byte(place: Place) -> None:
    content = bytearray((place.trained / "checkpoints" / "last.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    checkpoint(place, bytes(content))


def a_damaged_last_of_a_run(place: Place) -> None:
    run = place.folder / "run"
    shutil.copytree(place.trained, run)
    content = (run / "checkpoints" / "best.safetensors").read_bytes()
    (run / "checkpoints" / "best.safetensors").unlink()
    (run / "checkpoints" / "best.safetensors").write_bytes(content[:-7])


def another_architecture(place: Place) -> None:
    contents = checkpoint_file.read(place.trained / "checkpoints" / "last.safetensors")
    assert "width: 4" in contents["config"]
    contents["config"] = contents["config"].replace("width: 4", "width: 6")
    checkpoint_file.write(place.folder / "mine.safetensors", contents)


def a_foreign_file(place: Place) -> None:
    torch.save({"state_dict": {}}, place.folder / "mine.safetensors")


def another_run(place: Place) -> None:
    shutil.copytree(place.trained, place.folder / "run")


def a_config(place: Place, name: str, text: str, group: str = "experiment") -> None:
    folder = place.folder / "mine" / group
    folder.mkdir(parents=True)
    head = "# @package _global_\n" if group == "experiment" else ""
    (folder / f"{name}.yaml").write_text(head + text)


EVAL = ("eval", "threads=1", "device=cpu", "split=val")
ROWS = [
    # Words
    Mistake("verb", ("trian",), ("'trian' is not a verb", "did you mean 'train'?", "allowed:", "eval")),
    Mistake("flag before a verb", ("--cfg", "job"), ("'--cfg' is not a verb", "allowed:")),
    Mistake("flag of the version", ("-V",), ("'-V' is not a verb", "did you mean '--version'?")),
    Mistake(
        "path of a run as a word",
        ("eval", "outputs/digits/mine"),
        ("outputs/digits/mine: is a path without a key", "allowed: ckpt_path=outputs/digits/mine"),
    ),
    Mistake(
        "paths of a checkpoint and of images as words",
        ("predict", "last.safetensors", "run", "device=cpu"),
        ("2 problems", "allowed: ckpt_path=last.safetensors", "run: is a path without a key", "allowed: input=run"),
        another_run,
    ),
    Mistake(
        "path of images as a word after the checkpoint's key",
        ("predict", "ckpt_path=run", "photos/cats"),
        ("photos/cats: is a path without a key", "allowed: input=photos/cats"),
    ),
    Mistake("flag", ("train", "--multrun"), ("--multrun", "did you mean '--multirun'?")),
    Mistake("value of a flag", ("train", "--cfg", "jobs"), ("--cfg", "'jobs'", "job", "hydra")),
    Mistake("flag of list", ("list", "--groups"), ("unknown flag '--groups'", "allowed: --config-dir DIR")),
    Mistake("flag of env", ("env", "--jsno"), ("'--jsno'", "allowed: --json")),
    Mistake("group of list", ("list", "modle"), ("no group 'modle'", "did you mean 'model'?", "optimizer, ")),
    Mistake("option of show", ("show", "model=mpl"), ("no option 'mpl'", "did you mean 'mlp'?", "small_cnn")),
    Mistake(
        "key",
        ("train", "sede=1"),
        ("sede: is not a key", "did you mean 'seed'?", "allowed: a key of the schema", "from: the override sede=1"),
    ),
    Mistake(
        "key without its section",
        ("train", "weight_decay=1"),
        ("weight_decay: is not a key", "did you mean 'optimizer.weight_decay'?"),
    ),
    Mistake("+key", ("train", "+aump=true"), ("aump: is not a key", "did you mean 'amp'?", "the override +aump=true")),
    Mistake("++key", ("train", "++data.batchsize=3"), ("data.batchsize: is not a key", "'data.batch_size'?")),
    Mistake("key of eval", (*EVAL, "splt=val"), ("splt: is not a key", "did you mean 'split'?")),
    Mistake("key with --cfg", ("train", "--cfg", "job", "sede=1"), ("sede: is not a key", "did you mean 'seed'?")),
    Mistake("group", ("train", "optimiser=adam"), ("optimiser: is not a key", "did you mean 'optimizer'?")),
    Mistake(
        "option",
        ("train", "optimizer=adma"),
        ("optimizer: has no option 'adma'", "'adam'?", "allowed: adam, adamw, muon", "the override optimizer=adma"),
    ),
    Mistake("option of a sweep", ("train", "--multirun", "model=mlp,cmlp"), ("model: has no option 'cmlp'", "'mlp'?")),
    Mistake("no option at all", ("train", "model=null"), ("model: ", "allowed: a mapping with _target_")),
    Mistake("no override", ("train", "seed"), ("seed: is not an override", "allowed: key=value, group=option")),
    Mistake("unreadable value", ("train", "name=[1"), ("name=[1: has a value that cannot be read", "quote")),
    Mistake(
        "interpolation",
        ("train", "seed=${sede}"),
        ("seed: refers to 'sede'", "did you mean 'seed'?", "from: the override"),
    ),
    Mistake(
        "several values without --multirun",
        ("train", "seed=1,2"),
        ("seed: has several values", "--multirun", "allowed: one value", "from: the override seed=1,2"),
    ),
    Mistake(
        "deleting what the schema has",
        ("train", "~seed"),
        ("seed: cannot be deleted", "allowed: set it to a whole number of at least 0", "from: the override ~seed"),
    ),
    Mistake("deleting a key of a section", ("train", "~data.batch_size"), ("data.batch_size: cannot be deleted",)),
    Mistake("--experimental-rerun", ("train", "--experimental-rerun", "x"), ("a pickle", "use ckpt_path= instead")),
    Mistake("--resolve", ("train", "--resolve", "seed=1"), ("--resolve is for what --cfg shows",)),
    Mistake("--config-path", ("train", "--config-path", "x"), ("--config-path", "--config-dir")),
    Mistake("--config-dir", ("train", "--config-dir", "mine"), ("--config-dir: there is no folder", "mine")),
    Mistake("--config-dir of list", ("list", "--config-dir=mine"), ("--config-dir: there is no folder", "mine")),
    Mistake(
        "--config-name",
        ("train", "--config-name", "trian"),
        ("--config-name: there is no config 'trian'", "did you mean 'train'?", "allowed: eval, train"),
    ),
    # Values
    Mistake(
        "type",
        ("train", "epochs=many"),
        ("epochs: cannot be many", "allowed: a whole number of at least 1 or null", "from: the override epochs=many"),
    ),
    Mistake("range", ("train", "data.hflip=1.5"), ("data.hflip: cannot be 1.5", "at least 0 and at most 1")),
    Mistake(
        "processes", ("train", "devices=1000000", "device=cpu"), ("devices: asks for 1,000,000 processes", "at most ")
    ),
    Mistake("threads", ("train", "threads=100000"), ("threads: cannot be 100000", "at least 1 and at most 1024")),
    Mistake(
        "numbers that are not finite",
        ("train", "optimizer.lr=nan", "grad_clip.norm=inf", "data.normalize.mean=[inf]", "scheduler.warmup=-inf"),
        (
            "4 problems",
            "optimizer.lr: cannot be .nan",
            "allowed: finite numbers",
            "grad_clip.norm: cannot be .inf",
            "data.normalize.mean: cannot be [.inf]",
            "scheduler.warmup: cannot be -.inf",
        ),
    ),
    Mistake("truth for a number", ("train", "data.batch_size=true"), ("data.batch_size: cannot be true", "a whole")),
    Mistake("choice", ("train", "data.placement=dsk"), ("data.placement: cannot be dsk", "did you mean 'disk'?")),
    Mistake("open value", ("train", "epochs=???"), ("epochs: is missing", "a whole number", "the override epochs=???")),
    Mistake("open argument", ("train", "optimizer.lr=???"), ("optimizer.lr: is missing",)),
    Mistake(
        "open value in a file",
        ("train", "--config-dir", "mine", "+experiment=open", "seed=1"),
        ("2 problems", "model.width: is missing", "scheduler.warmup: is missing", "open.yaml:4"),
        lambda place: a_config(place, "open", "seed: ???\nmodel:\n  width: ???\nscheduler:\n  warmup: ???\n"),
        tiny=False,
    ),
    Mistake(
        "part of an option",
        ("train", "--config-dir", "mine", "model=part"),
        ("part.yaml:2:5: model has no option 'mpl'; did you mean 'mlp'?",),
        lambda place: a_config(place, "part", "defaults:\n  - mpl\n  - _self_\nwidth: 3\n", "model"),
        tiny=False,
    ),
    Mistake("text for what varies", ("audit", "vary=threads"), ("vary: cannot be threads", "vary=threads:1,2")),
    Mistake("list for what varies", ("audit", "vary=[threads]"), ("vary: Cannot merge DictConfig with ListConfig",)),
    Mistake("names of a sweep", ("train", "--multirun", "name=a,b"), ("name: names the folder of a sweep", "one name")),
    Mistake(
        "key of sweeps in a verb that keeps no runs",
        ("eval", "--multirun", "ckpt_path=run", "sweep.retry=all"),
        ("sweep.retry: is about jobs that train",),
        another_run,
        tiny=False,
    ),
    Mistake("scheduler of torch", ("train", "scheduler=StepLR"), ("scheduler: has no option", "scheduler.name=StepLR")),
    Mistake(
        "target of torch's kind",
        ("train", "scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=3"),
        ("scheduler.optimizer: is missing: torch.optim.lr_scheduler.StepLR needs it",),
    ),
    Mistake(
        "scheduler without methods",
        ("train", "scheduler._target_=odd_package.Odd"),
        ("scheduler._target_: odd_package.Odd gives a Odd without factor, observe", "shape(step)"),
        an_odd_package,
    ),
    Mistake(
        "task without methods",
        ("train", "task._target_=odd_package.Odd"),
        ("task._target_: odd_package.Odd gives a Odd without outputs, targets", "an object with outputs(classes)"),
        an_odd_package,
    ),
    Mistake(
        "metric without methods",
        ("train", "+metrics.odd._target_=odd_package.Odd", "checkpoint.monitor=val/loss"),
        ("metrics.odd._target_: ", "without update, compute", "allowed: an object with update(predictions, targets)"),
        an_odd_package,
    ),
    Mistake(
        "callback that takes no argument",
        ("train", "+callbacks.odd._target_=odd_package.Wrong"),
        ("callbacks.odd._target_: ", "whose on_step() does not take loop", "allowed: on_step(self, loop)"),
        an_odd_package,
    ),
    Mistake(
        "callback without methods",
        ("train", "+callbacks.odd._target_=odd_package.Misspelt"),
        ("callbacks.odd._target_: ", "without any method of a callback", "did you mean 'on_step'?", "on_evaluation("),
        an_odd_package,
    ),
    Mistake(
        "callback with one of its methods misspelt",
        ("train", "+callbacks.odd._target_=odd_package.HalfMisspelt"),
        ("callbacks.odd._target_: ", "whose on_stepp is never called", "did you mean 'on_step'?"),
        an_odd_package,
    ),
    Mistake("value for a section", ("train", "limit=3"), ("limit: cannot be 3", "a mapping of train_batches")),
    Mistake("no component", ("train", "callbacks.mine=3"), ("callbacks.mine: cannot be 3", "a mapping with _target_")),
    Mistake("no end", ("train", "epochs=null"), ("epochs: is null and so is max_steps", "set epochs=30")),
    Mistake("name", ("train", "name=a/../b"), ("name: 'a/../b' cannot be a folder name", "letters", "name=a/../b")),
    Mistake(
        "many at once",
        ("train", "sede=1", "epochs=0", "optimizer=adma", "optimizer.lrr=1", "model.widht=x", "tf32=2"),
        (
            "6 problems in the configuration",
            "sede: is not a key",
            "epochs: cannot be 0",
            "optimizer: has no option 'adma'",
            "optimizer.lrr: is not an argument of",
            "model.widht: is not an argument of",
            "tf32: cannot be 2",
        ),
    ),
    Mistake(
        "folder to trust",
        ("train", "trust=/etc,mine"),
        ("trust: '/etc' is not a package name", "allowed: a name as after import", "from: the override trust="),
    ),
    # Combinations
    Mistake(
        "deterministic with cudnn_benchmark",
        ("train", "deterministic=true", "cudnn_benchmark=true"),
        ("cudnn_benchmark: ", "deterministic=true rules out", "allowed: cudnn_benchmark=false, or deterministic=false"),
    ),
    Mistake("deterministic with tf32", ("train", "deterministic=true", "tf32=true"), ("tf32: rounds", "tf32=false")),
    Mistake(
        "conflict between presets",
        ("train", "reproducibility=strict", "performance=max", "tf32=true", "cudnn_benchmark=true"),
        ("2 problems", "cudnn_benchmark: picks", "tf32: rounds", "from: the override tf32=true"),
    ),
    Mistake(
        "workers for images in memory",
        ("train", "data.placement=ram", "data.num_workers=2"),
        ("data.num_workers: is 2", "data.placement=ram", "allowed: data.num_workers=auto, or data.placement=disk"),
    ),
    Mistake(
        "plateau without evaluations",
        ("train", "scheduler=plateau", "evaluate.every_epochs=null"),
        ("scheduler: follows a metric", "evaluate.every_epochs=1", "from: the override scheduler=plateau"),
    ),
    Mistake(
        "early stopping without evaluations",
        ("train", "callbacks=early_stopping", "evaluate.every_epochs=null"),
        ("callbacks.early_stopping: waits for evaluations", "evaluate.every_epochs=1", "early_stopping.yaml"),
    ),
    Mistake("split shares", ("train", "data.split.val=0.6", "data.split.test=0.5"), ("data.split: ", "less than 1")),
    Mistake("half of the statistics", ("train", "data.normalize.mean=[0.5]"), ("data.normalize: has only one of",)),
    # Components
    Mistake(
        "package of a target",
        ("train", "model._target_=no_such_package.Net"),
        ("model._target_: there is no package 'no_such_package'", "installed, or on PYTHONPATH"),
    ),
    Mistake(
        "attribute of a target",
        ("train", "model._target_=runner.models.small_cnn.SmalCNN"),
        ("model._target_: runner.models.small_cnn has no 'SmalCNN'", "did you mean 'SmallCNN'?", "from: the override"),
    ),
    Mistake("no dotted path", ("train", "model._target_=Net"), ("model._target_: 'Net' is not a dotted path",)),
    Mistake("target that is a module", ("train", "model._target_=runner.models"), ("model._target_", "not callable")),
    Mistake(
        "unknown argument",
        ("train", "model.widht=3"),
        ("model.widht: is not an argument of runner.models.small_cnn.SmallCNN", "did you mean 'width'?", "dropout"),
    ),
    Mistake(
        "arguments of the option that a new target does not take",
        ("train", "model._target_=odd_package.Odd", "model.widht=3"),
        (
            "model.dropout: is not an argument of odd_package.Odd",
            "allowed: ~model.dropout too, as it is an argument of model=small_cnn",
            "model.widht: is not an argument",
        ),
        a_package_with_a_signature,
    ),
    Mistake(
        "missing argument",
        ("train", "transform.train=[{_target_: torch.nn.Linear, bias: 3}]"),
        ("transform.train.0.in_features: is missing: torch.nn.Linear needs it", "transform.train.0.bias: cannot be 3"),
    ),
    Mistake(
        "type of an argument",
        ("train", "model.width=wide"),
        ("model.width: cannot be wide", "allowed: a whole number", "from: the override model.width=wide"),
    ),
    *(
        Mistake(f"{word} is refused", ("train", *others, word), (f"{key or word.partition('=')[0]}: ", says))
        for word, says, key, *others in (
            ("model.dropout=2", "dropout must be at least 0 and below 1, got 2", ""),
            ("optimizer.lr=-1", "Invalid learning rate: -1", ""),
            ("optimizer.betas=[2,0.9]", "Invalid beta parameter at index 0: 2", ""),
            ("optimizer.eps=-1", "Invalid epsilon value", ""),
            ("optimizer.weight_decay=-1", "Invalid weight_decay value", ""),
            ("optimizer.momentum=-1", "Invalid momentum value", "", "optimizer=sgd"),
            (
                "optimizer.momentum=0",
                "Nesterov momentum requires",
                "optimizer.nesterov",
                "optimizer=sgd",
                "optimizer.nesterov=true",
            ),
            ("loss.label_smoothing=2", "label_smoothing must be", ""),
            ("scheduler.warmup=-1", "warmup must not be negative", ""),
            (
                "scheduler.options.pct_start=2",
                "pct_start",
                "",
                "scheduler=torch",
                "scheduler.name=OneCycleLR",
                "scheduler.options.max_lr=1",
            ),
            ("scheduler.options.step_size=0", "by zero", "", "scheduler=torch", "scheduler.name=StepLR"),
            ("scheduler.options.step_size=a", "unsupported operand", "", "scheduler=torch", "scheduler.name=StepLR"),
            ("logger.tensorboard.flush_s=0", "flush_s must be", "", "logger=tensorboard"),
        )
    ),
    Mistake(
        "refused by a nested component",
        ("train", "data.shift=0", "transform.train.0.share=9"),
        ("transform.train.0.share: runner.data.transforms.augment.RandomShift refuses", "got 9"),
    ),
    Mistake(
        "patch size", ("train", "model=vit_tiny", "~model.width", "model.patch_size=3"), ("patch_size must divide",)
    ),
    Mistake(
        "number of classes",
        ("train", "model.num_classes=5"),
        ("model.num_classes: is 5, but the data says 10", "allowed: model.num_classes=null"),
    ),
    Mistake("loss for numbers", ("train", "task=regression"), ("loss: ", "CrossEntropy", "use loss=mse")),
    Mistake(
        "task for classes",
        ("train", "data.dataset.kind=regression"),
        ("task.num_classes: ", "the data has no classes", "task=regression loss=mse"),
    ),
    Mistake(
        "model that gives something else",
        ("train", "model._target_=odd_package.Odd"),
        ("model: gives (1, 3, 8, 8) for one image", "allowed: a tensor of shape (1, 10)"),
        an_odd_package,
    ),
    Mistake(
        "metric to watch",
        ("train", "checkpoint.monitor=val/acuracy"),
        ("checkpoint.monitor: there is no metric 'val/acuracy'", "'val/accuracy'?", "allowed: val/loss, val/accuracy"),
    ),
    # Machine and folders
    Mistake(
        "CUDA that is not there",
        ("train", "device=cuda"),
        ("device: 'cuda' is not available", "allowed: device=auto or device=cpu"),
        no_cuda,
    ),
    Mistake(
        "device", ("train", "device=gpu"), ("device: cannot be 'gpu'", "did you mean 'cuda'?", "allowed: auto, cpu")
    ),
    Mistake(
        "file for output_root", ("train",), ("output_root: cannot write outputs", "a file exists"), a_file_named_outputs
    ),
    Mistake(
        "file for the root of a sweep",
        ("train", "--multirun", "seed=0,1"),
        ("output_root: cannot write outputs", "a file exists"),
        a_file_named_outputs,
    ),
    Mistake(
        "file for hydra.run.dir",
        ("train", "hydra.run.dir=outputs/here"),
        ("hydra.run.dir: cannot be outputs/here: outputs is a file", "allowed: a folder"),
        a_file_named_outputs,
    ),
    Mistake(
        "directory of another run",
        ("train", "hydra.run.dir=run"),
        ("hydra.run.dir: run already holds a run", "allowed: another folder, or ckpt_path=run"),
        another_run,
    ),
    # Data
    Mistake(
        "data that are not there",
        ("train", "data=mnist", "data.root=nowhere", "logger=none"),
        ("data.root: MNIST is incomplete in", "nowhere/MNIST/raw", "data.download=true"),
        tiny=False,
    ),
    Mistake(
        "refused download",
        ("train", "data=mnist", "data.root=nowhere", "data.download=true", "logger=none"),
        ("MNIST", "connection refused", "nowhere/MNIST/raw"),
        offline,
        tiny=False,
    ),
    Mistake("folder of images", ("train", *IMAGES), ("data.root: ", "images does not exist"), tiny=False),
    Mistake(
        "class without images",
        ("train", *IMAGES),
        ("data.root: the class folder", "images/emu has no images", "remove the folder"),
        an_empty_class,
        tiny=False,
    ),
    Mistake(
        "truncated image",
        ("train", *IMAGES, "data.num_workers=0"),
        ("cannot read the image images/cat/", ".png", "Replace it or delete it", "data.on_error=skip"),
        truncated_images,
        tiny=False,
    ),
    Mistake(
        "truncated image in a worker",
        ("train", *IMAGES, "data.num_workers=1"),
        ("cannot read the image images/cat/", ".png", "Replace it or delete it", "data.on_error=skip"),
        truncated_images,
        tiny=False,
    ),
    Mistake(
        "sizes that differ",
        ("train", *IMAGES, "data.image_size=null", "data.num_workers=0"),
        ("different shapes", "(3, 8, 8)", "(3, 8, 9)", "allowed: data.image_size"),
        lambda place: images(place, ((8, 8), (9, 8))),
        tiny=False,
    ),
    Mistake(
        "no whole batch",
        ("train", "data.drop_last=true", "data.batch_size=1000"),
        ("data.batch_size: 1000 is more than", "data.drop_last=true leaves no batch", "allowed: a smaller"),
    ),
    Mistake(
        "channels", ("train", "data.normalize={mean: [0, 0], std: [1, 1]}"), ("data.normalize: has 2", "3 channels")
    ),
    Mistake("split of nothing", ("train", "data.dataset.samples=2"), ("data.split.val: 0.1 of 2", "not even one")),
    # Checkpoints
    Mistake("eval of nothing", EVAL, ("ckpt_path: is missing", "allowed: a checkpoint file")),
    Mistake(
        "checkpoint that is not there",
        (*EVAL, "ckpt_path=mien.safetensors"),
        (
            "ckpt_path: there is no mien.safetensors",
            "did you mean 'mine.safetensors'?",
            "allowed: a checkpoint file, a run directory",
        ),
        a_good_checkpoint,
    ),
    Mistake(
        "no run of this name",
        ("train", "ckpt_path=last"),
        ("ckpt_path: no run with a checkpoint in outputs/synthetic", "allowed: "),
    ),
    Mistake(
        "truncated checkpoint",
        (*EVAL, "ckpt_path=mine.safetensors"),
        ("mine.safetensors: is truncated",),
        a_truncated_checkpoint,
    ),
    Mistake(
        "flipped byte",
        ("train", "ckpt_path=mine.safetensors"),
        ("mine.safetensors: its contents do not match its checksum", "damaged"),
        a_flipped_byte,
        tiny=False,
    ),
    Mistake(
        "damaged checkpoint beside a whole one",
        (*EVAL, "ckpt_path=run/checkpoints/best.safetensors"),
        (
            "run/checkpoints/best.safetensors",
            "the newest valid one beside it: ckpt_path=run/checkpoints/last.safetensors",
        ),
        a_damaged_last_of_a_run,
    ),
    Mistake(
        "file of another program",
        (*EVAL, "ckpt_path=mine.safetensors"),
        ("mine.safetensors: ", "is not a checkpoint of runner's", "other programs", "init_from="),
        a_foreign_file,
    ),
    Mistake(
        "resuming with another model",
        ("train", "ckpt_path=mine.safetensors", "model.width=8"),
        ("model.width: cannot change when resuming", "allowed: the checkpoint's value, or a new run"),
        a_good_checkpoint,
        tiny=False,
    ),
    Mistake(
        "resuming another architecture",
        ("train", "ckpt_path=mine.safetensors", "epochs=2"),
        ("mine.safetensors: does not fit this run", "another shape"),
        another_architecture,
        tiny=False,
    ),
    Mistake(
        "evaluating another architecture",
        (*EVAL, "ckpt_path=mine.safetensors"),
        ("mine.safetensors: ", "tensors are not those of this model", "another shape"),
        another_architecture,
    ),
    Mistake(
        "split",
        (*EVAL[:-1], "split=tset", "ckpt_path=mine.safetensors"),
        (
            "split: cannot be tset",
            "did you mean 'test'?",
            "allowed: train, val or test",
            "from: the override split=tset",
        ),
        a_good_checkpoint,
    ),
    Mistake(
        "split that the data lack",
        (*EVAL, "ckpt_path=mine.safetensors", "data.split.val=0"),
        ("split: this data has no 'val' split", "allowed: train, test"),
        a_good_checkpoint,
    ),
    Mistake(
        "data with other classes",
        (*EVAL, "ckpt_path=mine.safetensors", "data.dataset.classes=4"),
        ("data: has 4 classes, but the checkpoint was trained on 10",),
        a_good_checkpoint,
    ),
]
NAMES = [row.name for row in ROWS]


def call_of(row: Mistake, tiny: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a row; those of `train` come after what makes a run tiny, so that they have the last say."""
    if row.words[0] != "train" or not row.tiny:
        return row.words
    return ("train", *tiny, *row.words[1:])


def check(row: Mistake, status: int, out: str, err: str) -> None:
    assert status == 2, out + err
    assert "Traceback" not in out + err
    said = " ".join(" ".join(line for line in err.splitlines() if not line.startswith("warning: ")).split())
    assert said.startswith("error: ")
    missing = [fragment for fragment in row.says if fragment not in said]
    assert not missing, f"{missing} not in:\n{err}"


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_mistake_is_a_sentence(row, run, workdir, trained, tiny, monkeypatch):
    row.prepare(Place(workdir, trained, monkeypatch))
    result = run(*call_of(row, tiny))
    check(row, result.status, result.out, result.err)


@pytest.mark.parametrize("name", ["many at once", "truncated image in a worker", "flipped byte"])
def test_a_mistake_is_a_sentence_in_a_process_of_its_own(name, spawn, workdir, trained, tiny, monkeypatch):
    row = ROWS[NAMES.index(name)]
    row.prepare(Place(workdir, trained, monkeypatch))
    done = spawn(*call_of(row, tiny))
    check(row, done.returncode, done.stdout, done.stderr)


WITHOUT_TORCH = {
    "train sede=1": "sede: is not a key",
    "train modle=mlp": "modle: is not a key",
    "train model=cnn": "model: has no option",
    "train data.dataset.kind=a data=csv": "data.dataset.kind: cannot be a",
    "train amp=fp17": "amp: cannot be fp17",
    "train optimizer.lr=high": "optimizer.lr: cannot be high",
    "train data.batch_size=0": "data.batch_size: cannot be 0",
    "train model=smal_cnn": "did you mean 'small_cnn'?",
    "train model=resnet50": "torchvision model.name=resnet50",
    "train optimizer=Adadelta loss=HuberLoss": "optimizer._target_=torch.optim.Adadelta",
    "train scheduler=StepLR": "scheduler=torch scheduler.name=StepLR",
    "train model.widht=3": "model.widht: is not an argument",
    "train scheduler.warmpu=3": "scheduler.warmpu: is not an argument",
    "train model=mlpp optimizer=SGDD": "did you mean 'mlp'",
    "train model=resnet50 optimizer=Adagrad loss=NLLLoss scheduler=StepLR": "torchvision model.name=resnet50",
    "train optimizer.betas=[0.9]": "optimizer.betas: cannot be [0.9]",
    "train --multirun seed=0,1 epochs=0": "epochs: cannot be 0",
    "train --multirun seed=0,1 epochs=1,0": "epochs: cannot be 0",
    "train resume=auto epochs=0": "epochs: cannot be 0",
    "eval ckpt_path=last split=tset": "split: cannot be tset",
    "train epoch=5 amp=fp17 model.widht=64": "3 problems",
    "train model=vit_tiny sede=1 optimizer.eps=x scheduler.warmup=a data.image_size=-1 model.heads=x": "5 problems",
}


def test_mistakes_in_keys_and_values_are_reported_without_importing_torch(workdir):
    code = "import sys; from runner.cli import main\nfor call in %r: print(main(call.split()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code % [*WITHOUT_TORCH]], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 False"] * len(WITHOUT_TORCH), done.stderr
    errors = done.stderr.split("error: ")[1:]
    wrong = [call for (call, says), error in zip(WITHOUT_TORCH.items(), errors, strict=True) if says not in error]
    assert not wrong, done.stderr


def test_every_row_has_a_name_of_its_own():
    assert len(set(NAMES)) == len(NAMES) >= 32


def test_a_mistake_in_the_config_leaves_nothing_behind(run, tiny, workdir):
    result = run("train", *tiny, "data.batch_size=0")
    assert result.status == 2
    assert list(workdir.iterdir()) == []
    for mistake in ("name=${nothere}", "name=${oc.env:NOT_THERE}"):
        result = run("train", *tiny, mistake, "hydra.run.dir=mine", "hydra.output_subdir=.hydra")
        assert result.status == 2, result.err
        assert "error: 1 problem" in result.err
        assert list(workdir.iterdir()) == []


def test_a_mistake_found_while_building_leaves_no_run(run, tiny, workdir):
    result = run("train", *tiny, "model.dropout=2")
    assert result.status == 2
    assert "dropout must be" in result.err
    assert not (workdir / "outputs").exists()
    result = run("train", *tiny, "model.dropout=2", "hydra.run.dir=chosen/mine")
    assert result.status == 2
    assert not (workdir / "chosen").exists()


def test_a_mistake_found_while_building_a_job_is_kept_with_the_job(run, tiny, workdir):
    assert run("train", *tiny, "--multirun", "model.dropout=2", "hydra.sweep.dir=sweep").status == 1
    summary = json.loads((workdir / "sweep" / "0" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "dropout must be" in summary["error"]
    assert "dropout must be" in (workdir / "sweep" / "0" / "run.log").read_text()


def test_a_config_of_ones_own_that_lacks_sections_is_told_which(run, workdir):
    (workdir / "mine").mkdir()
    (workdir / "mine" / "bare.yaml").write_text("seed: 1\n")
    result = run("train", "--config-dir", "mine", "--config-name", "bare")
    assert result.status == 2
    assert "model: is missing" in result.err
    assert "Traceback" not in result.err


def test_a_run_whose_directory_is_named_leaves_another_run_as_it_was(run, tiny, workdir, trained):
    shutil.copytree(trained, "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert run("train", *tiny, "hydra.run.dir=run").status == 2
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_the_traceback_of_a_mistake_is_shown_when_asked_for(run, tiny, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = run("train", *tiny, "model.dropout=2")
    assert result.status == 2
    assert "Traceback" in result.err
    assert "dropout must be" in result.err


def test_a_failure_that_is_no_mistake_in_the_call_names_its_line_and_has_status_1(run, tiny, workdir, monkeypatch):
    (workdir / "breaking_package.py").write_text("def model(**_):\n    raise RuntimeError('broken inside')\n")
    monkeypatch.syspath_prepend(workdir)
    result = run("train", *tiny, "model._target_=breaking_package.model")
    assert result.status == 1, result.err
    assert 'breaking_package.py", line 2, in model' in result.err
    assert "RuntimeError: broken inside" in result.err


def test_a_verb_whose_training_diverges_reports_a_sentence_and_status_3(run, tiny, monkeypatch):
    def diverging(composition):
        raise Diverged("the loss is nan in step 7")

    monkeypatch.setattr("runner.verbs.find_lr.run", diverging)
    result = run("find-lr", *(word for word in tiny if "epochs" not in word))
    assert result.status == 3
    assert result.err.startswith("error: diverged: the loss is nan in step 7; lower optimizer.lr")
    assert "Traceback" not in result.err
