"""Activation checkpointing changes what is kept, and not one bit of what is computed."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nested import equal
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.instrument.saved_tensors import bytes_for_backward
from runner.runtime import activation
from runner.runtime.activation import checkpoint_activations, checkpointed

Setting = bool | str | list[str]
IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """BatchNorm in both of its kinds of averaging, dropout, and an in-place operation."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.other_norm = nn.BatchNorm2d(width, momentum=None)
        self.drop = nn.Dropout(0.3)

    def forward(self, features: Tensor) -> Tensor:
        inside = self.norm(self.first(features)).relu_()
        return self.drop(self.other_norm(self.second(inside))) + features


class Drifting(nn.Module):
    """Divides by an average that the same forward pass has brought up to date, as no module of torch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("nothing", None)
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.last = nn.Conv2d(4, 4, 1)
        self.scale: Tensor

    def forward(self, features: Tensor) -> Tensor:
        features = self.layer(features) * self.weight
        with torch.no_grad():
            self.scale.mul_(0.5).add_(features.abs().mean(), alpha=0.5)
        return self.last(features / self.scale)


class Net(nn.Module):
    """Blocks, one of them used twice, one that drifts, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drifting = Drifting()
        self.unused = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for block in [*self.blocks, self.blocks[1]]:
            features = block(features)
        return self.head(self.drifting(features).mean(dim=(2, 3)))


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    yield
    activation.switch(False)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def apply(
    model: nn.Module, setting: Setting, autocast: Any = contextlib.nullcontext, image: Tensor = IMAGE
) -> tuple[str, list[str]]:
    """What was done, and warnings."""
    warnings = list[str]()
    send = lambda samples: model(torch.cat([image] * samples))  # noqa: E731
    ((_, what, _),) = checkpoint_activations(model, setting, send, autocast, warnings)
    return what, warnings


def train(model: nn.Module, autocast: Any = contextlib.nullcontext, steps: int = 2) -> list[Tensor]:
    """All that some steps change, and the gradients of the last."""
    model.train()
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(steps):
        optimizer.zero_grad()
        for _ in range(2):  # accumulated
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            with autocast():
                loss = nn.functional.cross_entropy(model(images).float(), torch.tensor([0, 1, 2, 0]))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.state_dict().values(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        (True, None),
        (True, torch.bfloat16),
        (True, torch.float16),
        ("drifting", None),
        (["blocks.[12]", "stem"], torch.float16),
        ("*", None),
    ],
    ids=str,
)
def test_weights_buffers_gradients_and_random_draws_are_those_of_a_plain_run(
    setting: Setting, dtype: torch.dtype | None
) -> None:
    def autocast() -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    plain, less = net(), net()
    what, _ = apply(less, setting, autocast)
    assert "block" in what
    assert equal(train(less, autocast), train(plain, autocast))


def test_the_statistics_of_batchnorm_are_counted_once_a_step() -> None:
    model = net()
    apply(model, True)
    train(model, steps=1)
    counts = [int(block.norm.num_batches_tracked) for block in model.blocks]  # type: ignore[union-attr, arg-type]
    assert counts == [2, 4, 2, 2], "two micro-batches, and the second block is used twice"


def test_less_is_kept() -> None:
    plain, less = net(), net()
    apply(less, True)
    images = IMAGE.expand(5, -1, -1, -1)
    before, after = (bytes_for_backward(model, functools.partial(model, images)) for model in (plain, less))
    assert after < 0.5 * before


def test_names_and_copies_are_those_of_the_model() -> None:
    plain, less = net(), net()
    apply(less, True)
    assert list(less.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in less.named_modules()] == [name for name, _ in plain.named_modules()]
    twin = copy.deepcopy(less)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(IMAGE).abs().max() == 0, "a copy computes with its own weights"
    assert less(IMAGE).abs().max() > 0


def test_a_forward_that_was_replaced_before_is_the_one_that_is_computed_again() -> None:
    layer, calls = nn.Linear(2, 2), []
    layer.forward = lambda inputs: calls.append(0) or (inputs * 3).sin()  # type: ignore[method-assign, func-returns-value]
    apply(nn.Sequential(layer), "0", image=torch.ones(1, 2))
    calls.clear()
    layer(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(calls) == 2


def test_nothing_is_computed_twice_where_nothing_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    apply(model, True)
    monkeypatch.setattr(activation, "checkpoint", None)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(IMAGE)
    with pytest.raises(TypeError, match="NoneType"):
        model(IMAGE)


def test_off_means_untouched() -> None:
    model = net()
    assert checkpoint_activations(model, False, model, contextlib.nullcontext, []) == []
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(True, [0, 1, 2, 3]), ("blocks.[13]", [1, 3]), (["blocks.0", "blocks.3*"], [0, 3]), ("blocks", [0, 1, 2, 3])],
    ids=str,
)
def test_a_setting_chooses_its_blocks(setting: Setting, expected: list[int]) -> None:
    model = net()
    assert apply(model, setting) == (f"recomputed in {len(expected)} blocks, Block", [])
    assert [number for number, block in enumerate(model.blocks) if "forward" in vars(block)] == expected


def test_a_model_without_blocks_is_reported() -> None:
    what, (warning,) = apply(nn.Sequential(nn.Conv2d(3, 4, 1)), True)
    assert what == "nothing recomputed"
    assert warning.startswith("activation_checkpointing=true has no effect: Sequential has no repeated blocks")


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^activation_checkpointing: the model has no module 'blocs'; did you mean"):
        apply(net(), ["blocs"])


class Marked(nn.Module):
    """A model whose one expensive part is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.calls = 0

    @checkpointed
    def branch(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.branch(images).mean(dim=(2, 3))


def test_marked_functions_are_computed_twice_only_while_it_is_on() -> None:
    torch.manual_seed(3)
    plain = Marked()
    less = copy.deepcopy(plain)
    assert apply(less, True) == ("recomputed in marked functions", [])
    less.calls = 0
    found = train(less, steps=1)
    assert less.calls == 4
    activation.switch(False)
    assert equal(train(plain, steps=1), found)
    assert plain.calls == 2


class InPlace(nn.Conv2d):
    """A block that spoils its input."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.mul_(2))


class Moody(nn.Conv2d):
    """A block that computes something else the second time."""

    calls = 0

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        outputs = super().forward(features)
        return outputs if self.calls % 2 else outputs.exp().sin()


@pytest.mark.parametrize(
    ("block", "words"), [(InPlace, "changes its input in place"), (Moody, "cannot be computed again")]
)
def test_a_block_that_cannot_be_computed_again_is_a_sentence(block: type[nn.Conv2d], words: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), block(4, 4, 1), nn.Flatten(), nn.LazyLinear(2))
    model(IMAGE)
    with pytest.raises(UserError, match=rf"^activation_checkpointing: .*{words}"):
        apply(model, "1")


def test_draws_on_apple_s_gpu_are_repeated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SimpleNamespace(state=torch.tensor(1))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: generator.state)
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: setattr(generator, "state", state))
    image = SimpleNamespace(device=torch.device("mps"))
    _, again = activation._contexts([], [image])()  # type: ignore[list-item]
    generator.state = torch.tensor(2)  # as the forward pass left it
    with again:
        assert generator.state == 1
    assert generator.state == 2
