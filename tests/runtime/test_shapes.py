"""`watch.shapes`: what goes into every module is noted, and a batch that has others ends the run by the module's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.base.errors import UserError
from runner.runtime.shapes import ShapeWatch


class Odd(nn.Module):
    """Does something else when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "usual"
        self.body = nn.Linear(3, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.body(images)
        if self.mode == "twice":
            found = self.body(images)
        if self.mode == "double":
            return found.double()
        if self.mode == "view":
            return found.reshape(-1, 2)
        if self.mode == "wide":
            return torch.cat([found, found], 1)
        return found


def watched(model: nn.Module) -> list[list[list[str]]]:
    tables: list[list[list[str]]] = []
    ShapeWatch(model, tables.append)
    return tables


def test_the_first_batch_is_a_table_of_every_module() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    tables = watched(model)
    for size in (5, 3):
        model(torch.zeros(size, 1, 4, 4))
    assert tables == [
        [
            ["0", "Conv2d", "float32 (B, 1, 4, 4)", "float32 (B, 2, 2, 2)"],
            ["1", "Flatten", "float32 (B, 2, 2, 2)", "float32 (B, 8)"],
            ["2", "Linear", "float32 (B, 8)", "float32 (B, 3)"],
            ["(model)", "Sequential", "float32 (B, 1, 4, 4)", "float32 (B, 3)"],
        ]
    ]


def test_batches_of_other_sizes_and_multiples_of_them_are_alike() -> None:
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1), nn.Linear(3, 4), nn.Unflatten(0, (-1, 2)))
    tables = watched(model)
    for size in (4, 1, 7):
        model(torch.zeros(size, 6))
    assert tables[0][2][2:] == ["float32 (2B, 3)", "float32 (2B, 4)"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("double", r"1 \(Odd\) gives float64 \(B, 4\) in batch 2 of training, and float32 \(B, 4\) in the first"),
        ("wide", r"1 \(Odd\) gives float32 \(B, 8\) in batch 2 of training, and float32 \(B, 4\) in the first"),
        ("view", r"1 \(Odd\) gives float32 \(2B, 2\) in batch 2"),
        ("twice", r"1\.body \(Linear\) is called 2 times in batch 2 of training, and called 1 times in the first"),
    ],
)
def test_a_batch_that_breaks_them_ends_at_the_module(mode: str, words: str) -> None:
    model = nn.Sequential(nn.Identity(), Odd())
    watched(model)
    model(torch.zeros(4, 3))
    model[1].mode = mode
    with pytest.raises(UserError, match=r"watch\.shapes: " + words):
        model(torch.zeros(4, 3))


def test_a_first_batch_that_failed_half_way_is_not_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Odd())
    tables = watched(model)
    failing = model[1].body.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        model(torch.zeros(8, 3))
    failing.remove()
    model(torch.zeros(4, 3))
    assert [row[0] for row in tables[0]] == ["0", "1.body", "1", "(model)"]
    model[1].mode = "wide"
    with pytest.raises(UserError, match=r"1 \(Odd\) gives float32 \(B, 8\) in batch 3 of training"):
        model(torch.zeros(4, 3))


def test_another_input_is_told_of_the_first_module_that_takes_it() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Identity())
    watched(model)
    model(torch.zeros(4, 3))
    with pytest.raises(UserError, match=r"0 \(Flatten\) takes float32 \(B, 2\) in batch 2 of training"):
        model(torch.zeros(4, 2))


def test_evaluation_is_looked_at_apart() -> None:
    class Two(nn.Module):
        def forward(self, images: torch.Tensor) -> Any:
            return (images, images[:, :1]) if self.training else images

    model = Two()
    watched(model)
    for training in (True, False, True, False):
        model.train(training)
        model(torch.zeros(2, 3))
    with pytest.raises(UserError, match="in batch 3 of evaluation"):
        model(torch.zeros(2, 4))


def test_what_is_computed_again_in_backward_is_no_further_call() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, images, use_reentrant=False)  # type: ignore[no-any-return]

    model = Again()
    watched(model)
    for _ in range(3):
        model(torch.zeros(2, 3, requires_grad=True)).sum().backward()


def test_a_run_shows_the_table_and_ends_with_the_same_bits(train: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "epochs=1", "limit.train_batches=3", "transform=none")
    plain, looked_at = train(*words), train(*words, "debug=shapes")
    assert "shapes in the first batch" in looked_at.out
    assert "float32 (B, 1, 8, 8)" in looked_at.out
    assert "shapes in" not in plain.out
    assert looked_at.summary["weights_sha256"] == plain.summary["weights_sha256"]


def test_a_compiled_model_is_refused(problems: Any) -> None:
    assert problems("debug=shapes", "compile=true")["watch.shapes"].allowed == "compile=false"
    assert problems("debug=nan", "compile=true")["watch.finite"].allowed == "compile=false"
