"""Every kind of wrong input is answered by a sentence and exit status 2, never by a traceback."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from runner.checkpoint import file as checkpoint_file

IMAGES = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "data=image_folder", "data.root=images",
)  # fmt: skip
IMAGES += ("data.image_size=8", "data.batch_size=4", "model=small_cnn", "model.width=4", "epochs=1")


def nothing(trained: Path) -> None:
    """An empty folder is enough for most mistakes."""


def images(trained: Path) -> None:
    for name in ("cat", "dog"):
        folder = Path("images", name)
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (8, 8), (number * 20, 10, 200)).save(folder / f"{number}.png")


def an_empty_class(trained: Path) -> None:
    images(trained)
    Path("images/emu").mkdir()


PACKAGE = """
from torch import nn

class Odd(nn.Identity):
    pass

class Sized:
    def __init__(self, num_classes):
        pass

class Wrong:
    def on_step(self):
        pass

class Misspelt:
    def on_stepp(self, loop):
        pass

class HalfMisspelt(Misspelt):
    def on_start(self, loop):
        pass
"""


def an_odd_package(trained: Path) -> None:
    Path("odd_package.py").write_text(PACKAGE)


def a_file_named_outputs(trained: Path) -> None:
    Path("outputs").write_text("not a folder")


def a_good_checkpoint(trained: Path) -> None:
    shutil.copy(trained / "checkpoints" / "last.safetensors", "mine.safetensors")


def a_damaged_last_of_a_run(trained: Path) -> None:
    another_run(trained)
    best = Path("run/checkpoints/best.safetensors")
    content = best.read_bytes()
    best.unlink()
    best.write_bytes(content[:-7])


def another_architecture(trained: Path) -> None:
    contents = checkpoint_file.read(trained / "checkpoints" / "last.safetensors")
    assert "width: 4" in contents["config"]
    contents["config"] = contents["config"].replace("width: 4", "width: 6")
    checkpoint_file.write(Path("mine.safetensors"), contents)


def another_run(trained: Path) -> None:
    shutil.copytree(trained, "run")


def a_misspelt_part(trained: Path) -> None:
    folder = Path("mine/model")
    folder.mkdir(parents=True)
    (folder / "part.yaml").write_text("defaults:\n  - mpl\n  - _self_\nwidth: 3\n")


# What is prepared, and then in each line (which goes on in indented ones) a call and the parts of the message, in any order.
# The words of `train` and of verbs in capital letters come after those that make a run tiny, unless `plain` is before it.
# fmt: off
TABLES: dict[Callable[[Path], None], str] = {
    nothing: """
trian | 'trian' is not a verb | did you mean 'train'? | allowed: | eval
--cfg job | '--cfg' is not a verb | allowed:
-V | '-V' is not a verb | did you mean '--version'?
eval outputs/digits/mine | outputs/digits/mine: is a path without a key | allowed: ckpt_path=outputs/digits/mine
train --cfg jobs | --cfg | 'jobs' | job | hydra
list --groups | unknown flag '--groups' | allowed: --config-dir DIR
env --jsno | '--jsno' | allowed: --json
list modle | no group 'modle' | did you mean 'model'? | optimizer,
show model=mpl | no option 'mpl' | did you mean 'mlp'? | small_cnn
train --cfg job sede=1 | sede: is not a key | did you mean 'seed'?
train seed=${sede} | seed: Interpolation key 'sede' not found | from: the override
train --resolve seed=1 | --resolve is for what --cfg shows
list --config-dir=mine | --config-dir: | mine is not a folder
train --config-name trian | --config-name: there is no config 'trian' | did you mean 'train'? | allowed: audit, bench, check
train devices=1000000 device=cpu | devices: asks for 1,000,000 processes | at most
train optimizer.lr=nan grad_clip.norm=inf data.normalize.mean=[inf] scheduler.warmup=-inf | 4 problems
    | optimizer.lr: cannot be .nan | allowed: finite numbers | grad_clip.norm: cannot be .inf
    | data.normalize.mean: cannot be [.inf] | scheduler.warmup: cannot be -.inf
train epochs=??? | epochs: is missing | a whole number | the override epochs=???
audit vary=threads | vary: cannot be threads | vary=threads:1,2
audit vary=[threads] | vary: Cannot merge DictConfig with ListConfig
train --multirun name=a,b | name: names the folder of a sweep | one name
train scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=3
    | scheduler.optimizer: is missing: torch.optim.lr_scheduler.StepLR needs it
train sede=1 epochs=0 optimizer=adma optimizer.lrr=1 model.widht=x tf32=2 | 4 problems
    | sede: is not a key | epochs: cannot be 0 | optimizer: has no option 'adma' | tf32: cannot be 2
train trust=/etc,mine | trust: '/etc' is not a package name | allowed: a name as after import | from: the override trust=
train data=own data.dataset._targt_=my_package.Net | data.dataset._target_: is missing, and '_targt_' is not a key
train model.dropout=2 | model.dropout: | dropout must be at least 0 and below 1, got 2
train optimizer=sgd optimizer.nesterov=true optimizer.momentum=0 | optimizer.nesterov: | Nesterov momentum requires
train scheduler=torch scheduler.name=StepLR scheduler.options.step_size=0 | scheduler.options.step_size: | by zero
train data.shift=0 transform.train.0.share=9 | transform.train.0.share: runner.data.transforms.augment.RandomShift refuses
    | got 9
train model=resnet18_cifar freeze=[stam] | freeze: the model has no module or parameter 'stam'; did you mean 'stem'?
train freeze=[all-but-haed] | freeze: | did you mean 'all-but-head'?
train 'freeze=["*"]' | freeze: leaves nothing to train in the first step
train 'freeze=["*"]' unfreeze_at=2 | freeze: leaves nothing to train in the first step
train model=resnet18_cifar freeze=[dropout] | freeze: 'dropout' has no trainable weights
train model=resnet18_cifar model.head=none | model: gives (1, 32) for one image
train model=airbench ~model.width data.image_size=32 model.head=none | model: gives (1, 256) for one image
train model=resnet18_cifar init=whiten | init: whiten does not apply: the first convolution needs two
train model=vit_tiny ~model.width init=zero_gamma | init: zero_gamma does not apply: ViT has no residual block
train model=mlp ~model.width swa=0.9 | swa: 0.9 begins after step 1 | the run ends at step 1
train swa=0.5 epochs=2 data.split.val=0 | swa: computes BatchNorm's statistics at evaluations, but there is no validation
train swa=0.1 'metrics={swa_hits: {_target_: torchmetrics.MeanMetric}}'
    | metrics.swa_hits: has the name of a metric of the swa average
train '+metrics.accuracy={_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 7}'
    | metrics.accuracy: cannot take outputs of shape
train dry_run=true devices=2 strategy=single | strategy: | devices=1
train dry_run=true devices=100 | devices: asks for 100 processes on the CPU | at most
train dry_run=true devices=2 data.batch_size=2 data.drop_last=true model=resnet18_cifar | data.batch_size: | a larger
train log.utilization=always | log.utilization: cannot be always | allowed: true, false or auto
train model.num_classes=5 | model.num_classes: is 5, but the data says 10 | allowed: model.num_classes=null
train task=regression | loss: | CrossEntropy | use loss=mse
train data.dataset.kind=regression | task.num_classes: | the data has no classes | task=regression loss=mse
train callbacks=early_stopping callbacks.early_stopping.monitor=val/lss | did you mean 'val/loss'?
train seed=18446744073709551616 | seed:
train checkpoint.monitor=val/acuracy | checkpoint.monitor: there is no metric 'val/acuracy' | 'val/accuracy'?
    | allowed: val/loss, val/accuracy
train device=gpu | device: cannot be 'gpu' | did you mean 'cuda'? | allowed: auto, cpu
plain train data=mnist data.root=nowhere logger=none | data.root: MNIST is incomplete in | nowhere/MNIST/raw
    | data.download=true
IMAGES | data.root: | images does not exist
train data.drop_last=true data.batch_size=1000 | data.batch_size: 1000 is more than | data.drop_last=true leaves no batch
    | allowed: a smaller
train 'data.normalize={mean: [0, 0], std: [1, 1]}' | data.normalize: has 2 | 3 channels
train data.dataset.samples=2 | data.split.val: 0.1 of 2 | not even one
EVAL | ckpt_path: is missing | allowed: a checkpoint file
train ckpt_path=last | ckpt_path: no run with a checkpoint in outputs/synthetic | allowed:
train max_time=soon | max_time: cannot be soon | 2h, 90m
show optimizer.lrr | did you mean 'optimizer.lr'?
copy model=mlp | needs an option and a folder
copy model=mlpp mine | model has no option 'mlpp'
copy modle=mlp mine | there is no group 'modle'
copy model=mlp mine --name vit_tiny | has an option 'vit_tiny' already
copy model=mlp /proc/nowhere | cannot write
audit vary=data.workers:0,2 | vary.data.workers: varies what is not a key | data.num_workers
audit vary=threads:1,2,3 | vary.threads: has 3 values, but there are two sides | vary=threads:A,B
audit vary=data.batch_size:0 | vary: data.batch_size=0 cannot be run | a whole number of at least 1
audit a=one.pt | b: is missing, and a is given | b=PATH
audit a=one.pt b=two.pt vary=seed:1 | vary: has no effect on checkpoints
audit a=one.pt b=two.pt | a: there is no one.pt
audit steps=0 | steps: cannot be 0
audit threads=1 steps=1 data.batch_size=32 data.root=nowhere data=image_folder | data.root
bench togles=[amp] toggles=[ampp] repeats=1 | togles: is not a key; did you mean 'toggles'? | toggles: cannot be ampp
    | repeats: cannot be 1
bench vary.data.batchsize=[1] vary.rate=[1] vary.optimizer=[sgd] vary.evaluate=[1]
    | vary.data.batchsize: varies what is not a key; did you mean 'vary.data.batch_size'?
    | vary.rate: varies what is not a key | vary.optimizer: varies a whole section | vary.evaluate: varies a whole section
bench date | date: is not an override
FIND-LR transform=none scheduler=constant num_steps=10 start=1 end=0.1 | start: is 1, and end is 0.1
FIND-LR transform=none scheduler=constant num_steps=3 | num_steps: cannot be 3
FIND-LR transform=none scheduler=constant num_steps=10 lr=auto
    | lr: can no longer be auto | run find-lr, and set the number that it prints
FIND-LR transform=none scheduler=constant num_steps=10 start=1e-9 end=1e-7
    | lr: no rate was found: the loss hardly falls at any rate from 1e-09 to 1e-07
FIND-LR transform=none scheduler=constant num_steps=10 optimizer.lr=0 | optimizer.lr: is 0
INSPECT features=haed | features: the model has no layer 'haed'; did you mean 'head'?
INSPECT tensors=stage.1 what=features | tensors: the model has no layer 'stage.1'; did you mean 'stages.1'?
INSPECT tensors=stage.1 what=activations | tensors: the model has no layer 'stage.1'
inspect what=weights split=tset samples=0 | what: cannot be weights
    | layers, activations, gradients, inputs, features or errors | split: cannot be tset; did you mean 'test'?
    | samples: cannot be 0
INSPECT features=head output=f.csv | output: cannot be f.csv
inspect ckpt_path=nowhere | ckpt_path: there is no nowhere
profile step=3 warmup_steps=-1 | step: is not a key; did you mean 'steps'? | warmup_steps: cannot be -1
PROFILE optimizer=sgd optimizer.lr=1e30 log.every_steps=2 scheduler=constant
    | cannot be profiled: lower optimizer.lr
CHECK only=[step-sizee] | only: there is no check or group 'step-sizee'; did you mean 'step-size'?
    | allowed: config, data, labels
CHECK skip=[step-sizee] | skip: there is no check or group 'step-sizee'; did you mean 'step-size'? | allowed: data, labels
CHECK skip=build | skip: 'build' always runs
CHECK skip=config | skip: 'config' always runs
report nowhere | nowhere
report . | holds no run
report name=digits | takes folders, not name= allowed: report outputs/digits
""",
    another_run: """
EVAL ckpt_path=run tta=[flip,five_crops] | five_crop
inspect threads=1 ckpt_path=run data.dataset.classes=3 task.num_classes=null what=errors | classes
PREDICT | input: is missing
PREDICT input=runs | did you mean 'run'?
PREDICT input=run/*.gif | there is no image in run/*.gif
PREDICT input=[test,run] | 'test' is a split of the data
PREDICT input=test output=rows.xlsx | output: cannot be 'rows.xlsx'
PREDICT input=test top_k=11 | there are 10 classes
PREDICT input=test tta=flop | did you mean 'flip'?
PREDICT input=test features=stage.2 | did you mean 'stages.2'?
PREDICT input=test model.width=8 | of another shape
report run column=seed | columns
report run columns=optimizer.rl | optimizer.lr
report run sort=acc | sort: cannot be acc: no run has it; did you mean 'val/accuracy'
report run where=seed>100 | to select runs, use runner.runs().to_pandas().query() in Python
report run seeds=some | seeds
report run diff=true | diff
report run diff=yes | diff
report run --html | html
report run against=run/summary.json | against
report run against=run tolerance.speed=1 | tolerance.speed
report run against=run tolerance.step=fast | tolerance.step
report run csv=nowhere/t.csv | mkdir -p nowhere
report run html=. | it is a folder
report run save_baseline= | save_baseline: cannot be ''
report run against= | against: is empty
report run against=nowhere | against: there is no nowhere
report run tolerance.step=0.1 | against=PLACE
report run tolerance=0.1 | tolerance.metric
report ckpt_path=run | report run
predict last.safetensors run device=cpu | 2 problems | allowed: ckpt_path=last.safetensors | run: is a path without a key
    | allowed: input=run
eval --multirun ckpt_path=run sweep.retry=all | sweep.retry: is about jobs that train
train hydra.run.dir=run | hydra.run.dir: run already holds a run | allowed: another folder, or ckpt_path=run
""",
    an_odd_package: """
train scheduler._target_=odd_package.Odd | scheduler._target_: odd_package.Odd gives a Odd without factor, observe
    | an object with factor(step)
train task._target_=odd_package.Odd | task._target_: odd_package.Odd gives a Odd without outputs, targets
    | an object with outputs(classes)
train +metrics.odd._target_=odd_package.Odd checkpoint.monitor=val/loss | metrics.odd._target_: | without update, compute
    | allowed: an object with update(predictions, targets)
train +callbacks.odd._target_=odd_package.Wrong | callbacks.odd._target_: | whose Wrong.on_step() does not take loop
    | allowed: on_step(self, loop)
train +callbacks.odd._target_=odd_package.Misspelt | callbacks.odd._target_: | is never called
    | did you mean 'on_step'? | on_evaluation(
train +callbacks.odd._target_=odd_package.HalfMisspelt | callbacks.odd._target_: | whose on_stepp is never called
    | did you mean 'on_step'?
train model._target_=odd_package.Odd | model: gives (1, 3, 8, 8) for one image | allowed: a tensor of shape (1, 10)
train model._target_=odd_package.Sized model.widht=3 | model.dropout: is not an argument of odd_package.Sized
    | allowed: ~model.dropout too, as it is an argument of model=small_cnn | model.widht: is not an argument
train data=synthetic data.dataset._target_=odd_package.Sized | data.dataset.noise: is not an argument of odd_package.Sized
    | allowed: ~data.dataset.noise too, as it is an argument of the former data.dataset._target_
""",
    a_file_named_outputs: """
train | output_root: cannot write outputs | a file exists
train --multirun seed=0,1 | output_root: cannot write outputs | a file exists
train hydra.run.dir=outputs/here | hydra.run.dir: cannot be outputs/here: outputs is a file | allowed: a folder
PROFILE steps=6 warmup_steps=1 output=outputs/there | error: output: cannot write
""",
    an_empty_class: """
IMAGES | data.root: the class folder | images/emu has no images | remove the folder
""",
    a_good_checkpoint: """
EVAL ckpt_path=mien.safetensors | ckpt_path: there is no mien.safetensors | did you mean 'mine.safetensors'?
    | allowed: a checkpoint file, a run directory
plain train ckpt_path=mine.safetensors model.width=8 | model.width: cannot change when resuming
    | allowed: the checkpoint's value, or a new run
EVAL split=tset ckpt_path=mine.safetensors | split: cannot be tset | did you mean 'test'? | allowed: train, val or test
    | from: the override split=tset
EVAL ckpt_path=mine.safetensors data.split.val=0 | split: this data has no 'val' split | allowed: train, test
EVAL ckpt_path=mine.safetensors data.dataset.classes=4 | data: has 4 classes, but the checkpoint was trained on 10
""",
    a_damaged_last_of_a_run: """
EVAL ckpt_path=run/checkpoints/best.safetensors | run/checkpoints/best.safetensors
    | the newest valid one beside it: ckpt_path=run/checkpoints/last.safetensors
""",
    another_architecture: """
plain train ckpt_path=mine.safetensors epochs=2 | mine.safetensors: does not fit this run | another shape
EVAL ckpt_path=mine.safetensors | mine.safetensors: | tensors are not those of this model | another shape
""",
    a_misspelt_part: """
plain train --config-dir mine model=part | model/part: Could not load 'model/mpl'
""",
}
# fmt: on
ROWS = [
    (prepare, *line.split(" | "))
    for prepare, table in TABLES.items()
    for line in re.sub(r"\n +", " ", table).split("\n")[1:-1]
]
EVAL = ("eval", "threads=1", "device=cpu", "split=val")
PREDICT = ("predict", "threads=1", "ckpt_path=run")


def call_of(line: str, tiny: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a call in a table."""
    first, *words = shlex.split(line)
    starts = {"IMAGES": ("train", *IMAGES), "EVAL": EVAL, "PREDICT": PREDICT, "plain": (), "train": ("train", *tiny)}
    given = (first.lower(), *tiny) if first[0].isupper() else (first,)
    return (*starts.get(first, given), *words)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0].__name__}: {row[1]}"[:70] for row in ROWS])
def test_a_mistake_is_a_sentence(row, rejected, workdir, trained, tiny, monkeypatch):
    prepare, line, *says = row
    prepare(trained)
    monkeypatch.syspath_prepend(workdir)
    err = rejected(*call_of(line, tiny)).err
    said = " ".join(" ".join(line for line in err.splitlines() if not line.startswith("warning: ")).split())
    assert said.startswith("error: ")
    missing = [fragment for fragment in says if fragment not in said]
    assert not missing, f"{missing} not in:\n{err}"


WITHOUT_TORCH = {
    "train sede=1": "sede: is not a key",
    "train model=cnn": "model: has no option",
    "train optimizer=Adadelta loss=HuberLoss": "optimizer._target_=torch.optim.Adadelta",
    "train --multirun seed=0,1 epochs=1,0": "epochs: cannot be 0",
    "train resume=auto epochs=0": "epochs: cannot be 0",
    "eval ckpt_path=last split=tset": "split: cannot be tset",
    "train epoch=5 amp=fp17 model.widht=64": "2 problems",
    "train model=vit_tiny sede=1 optimizer.eps=x scheduler.warmup=a data.image_size=-1 model.heads=x": "2 problems",
}


def test_mistakes_in_keys_and_values_are_reported_without_importing_torch(workdir):
    code = "import sys; from runner.cli import main\nfor call in %r: print(main(call.split()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code % [*WITHOUT_TORCH]], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 False"] * len(WITHOUT_TORCH), done.stderr
    errors = done.stderr.split("error: ")[1:]
    wrong = [call for (call, says), error in zip(WITHOUT_TORCH.items(), errors, strict=True) if says not in error]
    assert not wrong, done.stderr


def test_a_mistake_found_while_building_leaves_no_run(rejected, tiny, workdir):
    result = rejected("train", *tiny, "model.dropout=2")
    assert "dropout must be" in result.err
    assert not (workdir / "outputs").exists()
    result = rejected("train", *tiny, "model.dropout=2", "hydra.run.dir=chosen/mine")
    assert not (workdir / "chosen").exists()


def test_the_traceback_of_a_mistake_is_shown_when_asked_for(run, tiny, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = run("train", *tiny, "model.dropout=2")
    assert result.status == 2
    assert "Traceback" in result.err
    assert "dropout must be" in result.err


def test_a_config_of_ones_own_that_lacks_sections_is_told_which(rejected, workdir):
    (workdir / "mine").mkdir()
    (workdir / "mine" / "bare.yaml").write_text("seed: 1\n")
    result = rejected("train", "--config-dir", "mine", "--config-name", "bare")
    assert "model: is missing" in result.err
