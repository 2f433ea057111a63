"""Blending weights images and targets alike, by draws of the samples of the batch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.data.sample_rng import SampleRNG
from runner.data.transforms.mixing import BatchMix, CutMix, Mixing, Mixup, OneOf

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

WAYS: dict[str, Callable[[], BatchMix]] = {
    "mixup": lambda: Mixup(0.8),
    "mixup rarely": lambda: Mixup(0.8, p=0.3),
    "cutmix": CutMix,
    "cutmix rarely": lambda: CutMix(p=0.3),
    "one of": lambda: OneOf([Mixup(0.8), CutMix()]),
}
every_way = pytest.mark.parametrize("name", WAYS)


def labelled(count: int, channels: int = 2, height: int = 6, width: int = 10) -> tuple[Tensor, Tensor]:
    """Images whose pixels are their place in the batch, and classes that are it, too."""
    numbers = torch.arange(count)
    return numbers.float().view(-1, 1, 1, 1).expand(-1, channels, height, width).contiguous(), numbers


def mixed(way: BatchMix, count: int, epoch: int = 0, seed: int = 1, **shape: int) -> tuple[Tensor, Tensor]:
    images, classes = labelled(count, **shape)
    return Mixing(way, seed, count)(images, classes, torch.arange(count) + 100, epoch)


@every_way
def test_targets_are_the_shares_of_the_images_that_they_belong_to(name: str) -> None:
    for epoch in range(4):
        images, targets = mixed(WAYS[name](), 40, epoch)
        assert targets.dtype == torch.float32
        assert torch.allclose(targets.sum(1), torch.ones(40), atol=1e-6)
        assert (targets > 0).sum(1).max() <= 2
        # The mean pixel is the mean of the two places weighted by their shares, and so is the mean class.
        assert torch.allclose(images.mean((1, 2, 3)), targets @ torch.arange(40.0), atol=1e-4)


@every_way
def test_every_sample_is_given_away_once_and_never_to_itself(name: str) -> None:
    _, targets = mixed(WAYS[name](), 64)
    given = targets * (1 - torch.eye(64))
    assert ((given > 0).sum(0) <= 1).all()
    if "rarely" in name:
        assert 0.1 < float((given > 0).any(1).float().mean()) < 0.5
    else:
        assert (given > 0).any(1).float().mean() > 0.9


@every_way
def test_who_gets_what_depends_on_the_samples_and_not_on_their_order(name: str) -> None:
    images, classes = labelled(24)
    places = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    mixing = Mixing(WAYS[name](), 3, 24)
    straight, shuffled = (
        mixing(images, classes, classes, 2),
        mixing(images[places], classes[places], classes[places], 2),
    )
    assert torch.equal(straight[0][places], shuffled[0])
    assert torch.equal(straight[1][places], shuffled[1])


@every_way
def test_epochs_seeds_and_batches_draw_apart(name: str) -> None:
    way = WAYS[name]()
    images, classes = labelled(24)
    first = Mixing(way, 3, 24)(images, classes, classes, 2)
    for seed, epoch, offset in ((4, 2, 0), (3, 3, 0), (3, 2, 500)):
        other = Mixing(way, seed, 24)(images, classes, classes + offset, epoch)
        assert not torch.equal(first[1], other[1])
    assert all(map(torch.equal, first, Mixing(way, 3, 24)(images, classes, classes, 2)))


@every_way
def test_layout_is_kept_and_inputs_are_left_alone(name: str) -> None:
    images = torch.rand(12, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(12) % 4
    before = images.clone()
    mixing = Mixing(WAYS[name](), 0, 4)
    plain = mixing(images, classes, torch.arange(12), 0)
    last = mixing(images.contiguous(memory_format=torch.channels_last), classes, torch.arange(12), 0)
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    assert plain[0].is_contiguous()
    assert torch.equal(plain[0], last[0])
    assert torch.equal(plain[1], last[1])
    assert torch.equal(images, before)


@every_way
def test_a_batch_of_one_stays_as_it_is(name: str) -> None:
    images, targets = mixed(WAYS[name](), 1)
    assert torch.equal(images, labelled(1)[0])
    assert targets.tolist() == [[1.0]]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_weights_of_mixup_are_from_a_beta_distribution(alpha: float) -> None:
    _, targets = mixed(Mixup(alpha), 3000, channels=1, height=1, width=1)
    weights = targets.diagonal()
    assert abs(float(weights.mean()) - 0.5) < 0.04
    assert float(weights.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def test_cutmix_puts_in_one_rectangle_of_the_area_that_is_weighted() -> None:
    images, targets = mixed(CutMix(), 300, height=9, width=14)
    kept = images == torch.arange(300.0).view(-1, 1, 1, 1)
    assert (kept == kept[:, :1]).all()
    gone = ~kept[:, 0]
    rows, columns = gone.any(2).sum(1), gone.any(1).sum(1)
    assert torch.equal(gone.sum((1, 2)), rows * columns)
    assert torch.allclose(targets.diagonal(), 1 - gone.sum((1, 2)) / (9 * 14), atol=1e-6)
    assert gone.any(0).all(), "some pixels are never replaced"
    whole = (rows > 2) & (rows < 5)  # rarely cut off at the edge
    shape = columns[whole].float().mean() / rows[whole].float().mean()
    assert 1.1 < shape < 14 / 9 + 0.2


def test_one_way_is_chosen_for_the_whole_batch_and_all_as_often() -> None:
    def double(images: Tensor, targets: Tensor, rng: SampleRNG) -> tuple[Tensor, Tensor]:
        return images * 2, targets

    def halve(images: Tensor, targets: Tensor, rng: SampleRNG) -> tuple[Tensor, Tensor]:
        return images / 2, targets

    mixing = Mixing(OneOf([double, halve]), 0, 10)
    factors = []
    for epoch in range(400):
        out, _ = mixing(torch.ones(6, 1, 2, 2), torch.arange(6), torch.arange(6), epoch)
        assert out.unique().numel() == 1
        factors.append(float(out[0, 0, 0, 0]))
    assert 150 < factors.count(2.0) < 250
    assert set(factors) == {0.5, 2.0}


def test_a_device_that_makes_all_choices_and_selects_one_gives_the_same_bits() -> None:
    images, classes = labelled(16)
    soft = torch.nn.functional.one_hot(classes).float()
    ways = [Mixup(0.8), CutMix()]
    seen = set()
    for epoch in range(20):
        rng = SampleRNG(0, epoch, classes, -1)
        number = int(rng.batch_integer(2))
        expected = ways[number](images, soft, rng.fork(number))
        made = OneOf(ways)(images, soft, SampleRNG(0, epoch, classes, -1))
        assert all(map(torch.equal, made, expected))
        selected = OneOf(ways)._selected(images, soft, SampleRNG(0, epoch, classes, -1), torch.tensor(number))
        assert all(map(torch.equal, selected, expected))
        seen.add(number)
    assert seen == {0, 1}


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_numbers_to_predict_are_blended_as_numbers(shape: tuple[int, ...]) -> None:
    images, numbers = labelled(20)
    targets = (2.0 * numbers).view(-1, *(1,) * len(shape)).expand(-1, *shape).contiguous()
    images, blended = Mixing(Mixup(0.8), 0, None)(images, targets, numbers, 0)
    assert blended.shape == (20, *shape)
    assert torch.allclose(blended.view(20, -1)[:, 0], 2 * images[:, 0, 0, 0], atol=1e-4)


def test_labels_that_are_whole_numbers_are_blended_as_shares() -> None:
    labels = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0]])
    images, floats = Mixing(Mixup(0.8), 0, 3)(torch.zeros(4, 1, 2, 2), labels.float(), torch.arange(4), 0)
    blended = Mixing(Mixup(0.8), 0, 3)(torch.zeros(4, 1, 2, 2), labels, torch.arange(4), 0)[1]
    assert torch.equal(blended, floats)
    assert blended.dtype == images.dtype
    assert bool(((blended > 0) & (blended < 1)).any())


@pytest.mark.parametrize(
    ("targets", "classes", "words"),
    [
        (torch.zeros(4, dtype=torch.int64), None, "their number is not known"),
        (torch.zeros(4, 3, 2, dtype=torch.int64), 5, r"a sample's have shape \(3, 2\)"),
    ],
)
def test_classes_that_cannot_be_probabilities_are_reported(targets: Tensor, classes: Any, words: str) -> None:
    with pytest.raises(UserError, match=rf"transform.mix: blends classes .* {words}\n +allowed: transform.mix=null"):
        Mixing(Mixup(), 0, classes)(torch.zeros(4, 1, 2, 2), targets, torch.arange(4), 0)


SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "model=mlp", "model.hidden=[16]", "evaluate.test=false", "transform=mix", "data.hflip=0.5",
)  # fmt: skip


@pytest.mark.parametrize("loss", ["cross_entropy", "focal", "bce", "mse"])
def test_every_loss_trains_on_blended_classes(train: Any, loss: str) -> None:
    words = ["loss.label_smoothing=0.1", "loss.class_weights=balanced"] if loss == "cross_entropy" else []
    result = train(*SMALL, f"loss={loss}", *words, "epochs=12", "optimizer.lr=0.01", "data.dataset.noise=0.1")
    losses = [record["loss"] for record in result.metrics if record["split"] == "val"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.batch_size=1",), "transform.mix: blends samples of a batch, but data.batch_size=1"),
        (("transform.mix.choices=[]",), "transform.mix.choices: runner.data.transforms.mixing.OneOf refuses"),
        (("transform.mix.choices.0.alpha=x",), "transform.mix.choices.0.alpha: cannot be x"),
        (("transform=none", "transform.mix={alpha: 1}"), "transform.mix: names nothing to build"),
        (("transform=none", "transform.mix={_target_: builtins.dict}"), "transform.mix: builtins.dict gives something"),
        (("task=regression", "loss=mse"), "transform.mix: gives targets that task and loss cannot take"),
    ],
)
def test_what_cannot_be_blended_is_reported_before_training(
    rejected: Any, words: tuple[str, ...], message: str
) -> None:
    result = rejected("train", "threads=1", "logger=none", *SMALL, *words)
    assert message in result.err
