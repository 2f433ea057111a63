"""A check, its result, and every threshold of the checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from runner.engine.diagnosis import listed

Run = TypeVar("Run", bound=Callable[[Any], Any])

GROUPS = ("data", "labels", "samples", "batches", "baselines", "outputs", "model", "loss", "step", "settings")
"""In the order in which they run."""


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    status: Literal["pass", "warn", "fail", "skip"]  # skip: the check does not apply or could not run
    evidence: str  # the measured numbers; for a skipped check the reason
    fix: str = ""  # the key to set or the code to change; empty if nothing is wrong


@dataclass(frozen=True)
class Check:
    """One check."""

    group: str  # in `only` and `skip` it stands for all its checks
    run: Callable[[Any], Result]  # with a `CheckContext`
    any_task: bool = False  # whether it takes samples of any kind, and tasks that compute their own steps

    @property
    def name(self) -> str:
        """The name for `only` and `skip`: that of the function."""
        return self.run.__name__.replace("_", "-")

    @property
    def finds(self) -> str:
        """The fault that the check finds: the first line of the docstring."""
        return (inspect.getdoc(self.run) or "").splitlines()[0].rstrip(".")


REGISTERED: list[Check] = []
"""The checks of all modules that have been imported."""


def check(group: str, *, any_task: bool = False) -> Callable[[Run], Run]:
    """Register a function as a check of one of `GROUPS`; for `any_task` see `Check`."""

    def register(run: Run) -> Run:
        REGISTERED.append(Check(group, run, any_task))
        return run

    return register


class NotApplicable(Exception):
    """Raised by a check, or by what it needs, to skip it with a reason."""


def need(condition: object, reason: str) -> None:
    """Skip the check with a reason unless the condition holds."""
    if not condition:
        raise NotApplicable(reason)


passed = functools.partial(Result, "pass")  # with evidence; nothing is wrong
warned = functools.partial(Result, "warn")  # with evidence and a fix; something is unusual, or wrong in most cases
failed = functools.partial(Result, "fail")  # with evidence and a fix; something is wrong
join_names = functools.partial(listed, most=3)  # the first names, and the number of the others


def graded(evidence: str, fix: str, *, fail: bool = False, warn: bool = False) -> Result:
    """Failed, warned or passed, whichever applies first."""
    return Result("fail" if fail else "warn" if warn else "pass", evidence, fix if fail or warn else "")


def none_of(names: Sequence[str], what: str, fix: str, otherwise: str, *, warn: bool = False) -> Result:
    """Passed if there are no names; else failed, or warned: their number, what is wrong with them, and the first of them."""
    evidence = f"{len(names)} {what}: {join_names(names)}" if names else otherwise
    return graded(evidence, fix, fail=bool(names) and not warn, warn=bool(names))


@dataclass(frozen=True)
class Limits:
    """Where a measured number stops being usual; each threshold with its reason."""

    # How much is looked at
    batch: int = 64  # images of the batch that goes through the model
    batch_values: int = 2**21  # values of all its images: 16 photographs of 224 by 224
    fewest: int = 16  # images of that batch, however large they are; and images that have statistics
    together: int = 192  # images of training batches that are compared
    together_values: int = 2**24  # values of these images
    whole_bytes: int = 2**28  # images in memory that are all measured
    scored: int = 30  # held-out samples of a score: fewer have an error of 10 points
    fitted: int = 60  # samples of a linear model
    compared: int = 256  # random held-out images that are compared with all training images

    # Images
    outlier: float = 20.0  # median deviations from the median: damage and other units, not unusual pictures
    accident: float = 0.01  # share of images: a few damaged files are not a fault of the code
    empty: float = 0.15  # share of its contrast that is left of an image that shows nothing
    emptied: float = 0.2  # share of augmented images that show nothing; half of them fail
    moved_warn: float = 1.0  # deviations by which augmentation moves a mean: jitter moves single images, not all
    moved_fail: float = 3.0  # hardly an image looks as in an evaluation
    scaled_warn: float = 2.0  # factor by which it changes a deviation, as no crop and no jitter does on average
    scaled_fail: float = 5.0  # the contrast is another one
    mean_warn: float = 0.75  # deviations of data.normalize from the data: other photographs are closer
    mean_fail: float = 2.0  # all inputs have one sign
    std_warn: float = 2.0  # other photographs are closer
    std_fail: float = 4.0  # the first layer learns at another rate than all others
    same_picture: float = 0.9999  # correlation of two images of a batch
    turned: float = 0.75  # share that a linear model takes for turned, and of train that it does not

    # Targets
    copies_warn: float = 0.005  # share of a split: a few copies are an accident
    copies_fail: float = 0.5  # share of a split: the data set maps many indices to one image
    leaked_warn: float = 0.001  # share of a held-out split: simple drawings are alike now and then
    leaked_fail: float = 0.005  # a score is wrong by up to half a point
    same_thumbnail: float = 0.9995  # correlation at which two thumbnails always show the same picture
    same_detail: float = 0.9  # least correlation of the detail of the same picture
    nearer: float = 0.25  # distance to the same picture, as a share of that to others, which may be alike too
    near: float = 0.01  # share of similar pictures: a few are an accident
    expected: float = 10.0  # expected samples of a class, of which all are missing by chance in 1 of 20,000 splits
    frequent: float = 0.9  # share of the largest class
    imbalance: float = 50.0  # times as many samples as the smallest class has
    rare_label: float = 0.02  # share of samples: a label that few batches of 50 have
    shares_apart: float = 0.15  # of the samples, beyond chance
    target_scale: float = 30.0  # deviations of the mean from 0, and of the deviation from 1 in either direction
    shifted: float = 0.2  # distance of two distributions of targets (Kolmogorov-Smirnov), beyond chance
    related: float = 3.0  # standard errors by which predictions of a linear model have to do with the targets
    gain: float = 0.2  # share of its gain on train that a linear model keeps on a split with the right targets
    weights_agree: float = 0.5  # correlation of class weights with sizes of classes: the inverse has -1
    bad_boxes_warn: float = 0.01  # share of boxes: a few are an accident
    bad_boxes_fail: float = 0.2  # share of boxes: the format is another one
    repeated_warn: float = 0.02  # share of the samples of a batch
    repeated_fail: float = 0.2  # share of the samples of a batch: the transform is wrong
    swapped: float = 0.1  # share of training images that show another sample

    # Signals
    gradient_warn: float = 1e9  # factor between gradients: ConvNeXt scales some layers by 1e-6
    gradient_fail: float = 1e12  # beyond what one learning rate can train
    gradient_large: float = 1e4  # size of a gradient, which no learning rate in use can stand; 100 times that fails
    mixed: float = 1e-3  # of its own change: more than the rounding of kernels for other batch sizes
    repeated: float = 1e-4  # of the outputs: more than rounding
    used: float = 1e-6  # of the outputs, by which an image changes them at least: more than rounding
    varied: float = 1e-2  # of the outputs, by which they differ between images where their scale is compared
    mode_scale: float = 1.6  # factor between outputs in both modes: dropout keeps the mean, up to nonlinear layers
    mode_scale_norms: float = 2.5  # of models with BatchNorm: EfficientNet with stochastic depth has 2.0

    # Loss
    high_warn: float = 2.0  # times the loss of a guess; below half of it warns too
    high_fail: float = 10.0  # times the loss of a guess: the first steps only undo it
    left: float = 0.2  # of what the first loss is too high by after four steps: MNASNet has 0.16, a large head 0.27
    close: float = 1e-3  # relative difference of two losses that are computed in different ways
    right: float = 0.9  # share of right answers, and correlation, of outputs that are optimized freely
    ignored: float = 1e-6  # share that a class counts of what another one does
    unequal: float = 300.0  # factor between classes of what a sample counts: class weights of 100 may be meant

    # Steps and settings
    direction: int = 256  # values of a weight whose direction is compared: steps of few values are alike by chance
    downhill: float = 3.0  # standard errors by which a step has to do with the gradients
    undone: float = 0.01  # share of a step that callbacks leave
    changed: float = 10.0  # times the size of a step by which callbacks change weights
    stuck: float = 0.003  # share of their size that weights move by in the whole run
    slow: float = 0.02  # share of their size that weights move by in the whole run: little is learned
    fast: float = 0.7  # share of their size that weights move by in one step, of Adam
    fast_sgd: float = 3.0  # first gradients of SGD are large
    fast_fail: float = 10.0  # times their size: a weight forgets its start in one step
    initial_warn: float = 0.01  # share of initial weights in an average
    initial_fail: float = 0.1  # the average says little about training
    dropout_warn: float = 0.8  # share that is dropped: 0.1 to 0.5 is usual
    dropout_fail: float = 0.95  # share that is dropped: hardly anything is left


LIMITS = Limits()
