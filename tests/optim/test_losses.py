"""Losses against torch's own, their independence of how samples are batched, and the refusal to broadcast."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runner.optim.losses import BinaryCrossEntropy, CrossEntropy, Focal, MeanSquaredError

WEIGHTS = [1.0, 2.0, 0.5, 4.5]


def batch(size: int = 12, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, classes and soft targets in float64."""
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(size, classes, generator=source, dtype=torch.float64)
    soft = torch.rand(size, classes, generator=source, dtype=torch.float64).softmax(1)
    return logits, torch.randint(classes, (size,), generator=source), soft


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": CrossEntropy,
    "cross_entropy-smooth": lambda: CrossEntropy(label_smoothing=0.1),
    "cross_entropy-weighted": lambda: CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1),
    "focal": Focal,
    "focal-weighted": lambda: Focal(gamma=1.5, class_weights=WEIGHTS),
    "bce": BinaryCrossEntropy,
    "bce-weighted": lambda: BinaryCrossEntropy(WEIGHTS),
    "mse": MeanSquaredError,
}
every_loss = pytest.mark.parametrize("build", LOSSES.values(), ids=LOSSES.keys())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_is_torch_s(smoothing: float) -> None:
    logits, classes, soft = batch()
    loss = CrossEntropy(label_smoothing=smoothing)
    for targets in (classes, soft):
        expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        torch.testing.assert_close(loss(logits, targets), expected)


def test_class_weights_are_torch_s_but_for_the_denominator() -> None:
    logits, classes, _ = batch()
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = F.cross_entropy(logits, classes, weight=weight / weight.mean(), reduction="none").mean()
    torch.testing.assert_close(CrossEntropy(class_weights=WEIGHTS)(logits, classes), expected)
    scaled = CrossEntropy(class_weights=[10 * value for value in WEIGHTS])
    torch.testing.assert_close(scaled(logits, classes), expected)


def test_balanced_weights_make_every_class_count_alike() -> None:
    counts = torch.tensor([8, 3, 1, 4])
    classes = torch.arange(4).repeat_interleave(counts)
    losses = torch.zeros(len(classes), 4, dtype=torch.float64)
    per_class = []
    loss = CrossEntropy(class_weights="balanced", num_classes=4, class_counts=counts)
    for index in range(4):
        mine = classes == index
        per_class.append(loss(losses[mine], classes[mine]).item() * int(mine.sum()))
    assert per_class == pytest.approx([per_class[0]] * 4)
    assert loss.weight is not None
    assert loss.weight.mean().item() == pytest.approx(1)


def test_focal_with_gamma_0_is_cross_entropy() -> None:
    logits, classes, soft = batch()
    for weights in (None, WEIGHTS):
        for targets in (classes, soft):
            expected = CrossEntropy(class_weights=weights)(logits, targets)
            torch.testing.assert_close(Focal(gamma=0.0, class_weights=weights)(logits, targets), expected)


def test_focal_is_its_formula_and_the_same_for_one_hot_targets() -> None:
    logits, classes, _ = batch()
    p = logits.softmax(1)[torch.arange(len(classes)), classes]
    expected = (-((1 - p) ** 2) * p.log()).mean()
    torch.testing.assert_close(Focal(gamma=2.0)(logits, classes), expected)
    one_hot = F.one_hot(classes, 4).double()
    torch.testing.assert_close(Focal(gamma=2.0)(logits, one_hot), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_has_finite_gradients_where_the_model_is_certain(gamma: float) -> None:
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    Focal(gamma=gamma)(logits, torch.tensor([0, 0])).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_binary_cross_entropy_is_torch_s_on_one_hot_targets() -> None:
    logits, classes, soft = batch()
    one_hot = F.one_hot(classes, 4).double()
    loss = BinaryCrossEntropy(num_classes=4)
    torch.testing.assert_close(loss(logits, classes), F.binary_cross_entropy_with_logits(logits, one_hot))
    torch.testing.assert_close(loss(logits, soft), F.binary_cross_entropy_with_logits(logits, soft))
    column, binary = logits[:, :1], classes % 2
    expected = F.binary_cross_entropy_with_logits(column[:, 0], binary.double())
    torch.testing.assert_close(BinaryCrossEntropy()(column, binary), expected)
    above = F.binary_cross_entropy_with_logits(logits, (soft > 0.2).double())
    assert 0 < int((soft > 0.2).sum()) < soft.numel()
    torch.testing.assert_close(BinaryCrossEntropy(target_threshold=0.2)(logits, soft), above)


def test_positive_weights_are_torch_s_and_can_balance_each_label() -> None:
    logits, _, soft = batch()
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, soft, pos_weight=weights)
    torch.testing.assert_close(BinaryCrossEntropy(WEIGHTS, num_classes=4)(logits, soft), expected)
    counts = torch.tensor([[6, 3], [2, 9]])
    auto = BinaryCrossEntropy("auto", num_classes=2, label_counts=counts)
    assert auto.pos_weight is not None
    assert auto.pos_weight.tolist() == pytest.approx([3.0, 1 / 3])
    one = F.binary_cross_entropy_with_logits(logits, soft, pos_weight=weights.new_tensor([2.0]))
    torch.testing.assert_close(BinaryCrossEntropy(2.0)(logits, soft), one)


def test_mean_squared_error_takes_images() -> None:
    images, targets = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert torch.equal(MeanSquaredError(0)(images, targets), F.mse_loss(images, targets))


def test_mean_squared_error_takes_vectors_columns_matrices_and_classes() -> None:
    logits, classes, soft = batch()
    column, values = logits[:, :1], soft[:, 0]
    loss = MeanSquaredError()
    torch.testing.assert_close(loss(column, values), F.mse_loss(column[:, 0], values))
    torch.testing.assert_close(loss(column, values[:, None]), F.mse_loss(column[:, 0], values))
    torch.testing.assert_close(loss(logits, soft), F.mse_loss(logits, soft))
    torch.testing.assert_close(loss(logits, classes), F.mse_loss(logits, F.one_hot(classes, 4).double()))


@every_loss
def test_blended_targets_of_one_class_are_that_class(build: Callable[[], nn.Module]) -> None:
    logits, classes, _ = batch()
    loss = build()
    torch.testing.assert_close(loss(logits, F.one_hot(classes, 4).float()), loss(logits, classes))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mse"])
def test_the_loss_of_blended_targets_is_the_blend_of_the_losses(name: str) -> None:
    logits, classes, _ = batch()
    loss, others = LOSSES[name](), classes.roll(1)
    blended = 0.3 * F.one_hot(classes, 4) + 0.7 * F.one_hot(others, 4)
    expected = 0.3 * loss(logits, classes) + 0.7 * loss(logits, others)
    torch.testing.assert_close(loss(logits, blended.double()), expected)


@every_loss
@given(size=st.integers(2, 20), parts=st.integers(1, 5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_parts_of_a_batch_add_up_to_the_whole(build: Callable[[], nn.Module], size: int, parts: int, seed: int) -> None:
    logits, classes, soft = batch(size, seed=seed)
    loss = build()
    for targets in (classes, soft):
        whole = logits.clone().requires_grad_()
        loss(whole, targets).backward()
        split = logits.clone().requires_grad_()
        for chunk, expected in zip(split.chunk(parts), targets.chunk(parts), strict=True):
            (loss(chunk, expected) * len(chunk) / size).backward()
        assert whole.grad is not None
        assert split.grad is not None
        torch.testing.assert_close(split.grad, whole.grad)


@every_loss
def test_the_loss_is_a_differentiable_scalar(build: Callable[[], nn.Module]) -> None:
    logits, classes, _ = batch(5)
    assert torch.autograd.gradcheck(lambda values: build()(values, classes), (logits.requires_grad_(),))


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_summed_in_float32(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    logits, classes, soft = batch()
    rounded = logits.to(dtype)
    for targets in (classes, soft.float()):
        loss = build()(rounded, targets)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, build()(rounded.float(), targets))


@every_loss
@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.zeros(6, 4), torch.zeros(6)),
        (torch.zeros(6, 4), torch.zeros(6, 1)),
        (torch.zeros(6, 4), torch.zeros(6, 3)),
        (torch.zeros(6, 4), torch.zeros(1, 4)),
        (torch.zeros(6, 4), torch.zeros(5, dtype=torch.int64)),
        (torch.zeros(6, 4), torch.zeros(6, 1, dtype=torch.int64)),
        (torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.int64)),
        (torch.zeros(6, 4), torch.zeros(6, dtype=torch.int32)),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_never_broadcast(
    build: Callable[[], nn.Module], logits: Tensor, targets: Tensor
) -> None:
    shape = re.escape(str(tuple(targets.shape)))
    with pytest.raises(ValueError, match=rf"targets \w+ {shape} do not fit logits \(6, 4\); expected: "):
        build()(logits, targets)


@every_loss
@pytest.mark.parametrize("shape", [(6,), (6, 4, 1), (0, 4)])
def test_logits_that_are_not_a_matrix_are_refused(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the model must return logits"):
        build()(torch.zeros(shape), torch.zeros(shape[:1], dtype=torch.int64))


_IMAGES = torch.randn(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "reason"),
    [
        (MeanSquaredError(), torch.zeros(3, 1), torch.zeros(1, 3), "do not fit"),  # and are not broadcast
        (MeanSquaredError(), _IMAGES, _IMAGES[:, :1], "logits"),
        (CrossEntropy(), _IMAGES, torch.zeros(2, 4, 5, dtype=torch.int64), r"\(2, 3, 4, 4\)"),
        *(
            (kind(num_classes=3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64),
             "the model returns 4 outputs, and the loss is for num_classes=3")
            for kind in (CrossEntropy, Focal, BinaryCrossEntropy, MeanSquaredError)
        ),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_are_refused(loss: nn.Module, outputs: Tensor, targets: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loss(outputs, targets)


def test_class_weights_move_with_the_module_and_stay_out_of_its_state() -> None:
    loss = CrossEntropy(class_weights=WEIGHTS)
    assert loss.state_dict() == {}
    assert loss.to("meta").weight.is_meta  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing must be from 0 to 1, got 1.5"),
        (lambda: CrossEntropy(class_weights=[1.0, -1.0]), "class_weights must be numbers that are not negative"),
        (lambda: CrossEntropy(class_weights=[0.0, 0.0]), "class_weights must be .* and not all 0"),
        (lambda: CrossEntropy(class_weights=[1.0], num_classes=3), "one weight for each of 3 classes, got 1"),
        (lambda: Focal(class_weights="even"), "class_weights must be numbers, 'balanced' or null"),  # type: ignore[arg-type]
        (lambda: Focal(class_weights="balanced"), "balanced needs data with classes"),
        (
            lambda: Focal(class_weights="balanced", class_counts=torch.tensor([3, 0, 2, 0])),
            r"needs training samples of every class; classes without: \[1, 3\]",
        ),
        (lambda: BinaryCrossEntropy([1.0, 2.0], num_classes=3), "one weight for each of 3 outputs, got 2"),
        (lambda: BinaryCrossEntropy(target_threshold=1.0), "target_threshold must be from 0 to below 1"),
        (lambda: BinaryCrossEntropy(0.0), "pos_weight must be one or several numbers above 0"),
        (lambda: BinaryCrossEntropy("auto"), "pos_weight=auto needs a data set with an attribute targets"),
        (lambda: BinaryCrossEntropy("some"), "pos_weight must be numbers, 'auto'"),  # type: ignore[arg-type]
        (
            lambda: BinaryCrossEntropy("auto", label_counts=torch.tensor([[3, 4], [1, 0]])),
            r"needs training samples with every label; labels without: \[1\]",
        ),
        (
            lambda: BinaryCrossEntropy("auto", label_counts=torch.tensor([[0, 2], [4, 2]])),
            r"needs training samples without every label; labels of all: \[0\]",
        ),
        (lambda: Focal(gamma=-1), "gamma must not be negative, got -1"),
        (lambda: CrossEntropy(num_classes=0), "num_classes must be at least 2, got 0"),
    ],
)
def test_an_argument_out_of_range_is_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_pixels_is_the_mean_over_those_that_count(weights: list[float] | None, smoothing: float) -> None:
    logits, classes = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True), torch.randint(0, 3, (2, 4, 5))
    classes[0, :3] = 255
    loss = CrossEntropy(label_smoothing=smoothing, class_weights=weights, num_classes=3, ignore_index=255)
    weight = None if loss.weight is None else loss.weight.double()
    summed = F.cross_entropy(logits, classes, weight, ignore_index=255, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss(logits, classes), summed / (classes != 255).sum())
    rows = logits.movedim(1, -1)[classes != 255], classes[classes != 255]
    torch.testing.assert_close(loss(logits, classes), loss(*rows))
    focal = Focal(class_weights=weights, num_classes=3, ignore_index=255)
    torch.testing.assert_close(focal(logits, classes), focal(*rows))


@pytest.mark.parametrize("loss", [CrossEntropy(ignore_index=255), Focal(ignore_index=255)])
def test_the_loss_is_zero_where_no_pixel_counts(loss: nn.Module) -> None:
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    value = loss(logits, torch.full((2, 4, 4), 255))
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
