"""`watch.shapes`: the shapes of the first batch are shown, and those of a batch that fails, with the bits of a plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.runtime.shapes import COLUMNS, watching_shapes
from runner.tracking.formats import aligned


class Again(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, images, use_reentrant=False)  # type: ignore[no-any-return]


def train_on(model: nn.Module, *batches: tuple[int, int]) -> None:
    """Batches of so many images of so many pixels."""
    for samples, pixels in batches:
        model(torch.zeros(samples, 1, pixels, pixels)).sum().backward()


def test_the_first_batch_is_a_table_of_every_module_and_a_batch_that_fails_another() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), Again())
    tables: list[list[list[str]]] = []
    with pytest.raises(RuntimeError) as failed, watching_shapes(model, aligned, tables.append):
        train_on(model, (5, 4), (3, 4), (5, 6))
    assert tables == [
        [
            ["(model)", "Sequential", "float32 (5, 1, 4, 4)", "float32 (5, 3)"],
            ["0", "Conv2d", "float32 (5, 1, 4, 4)", "float32 (5, 2, 2, 2)"],
            ["1", "Flatten", "float32 (5, 2, 2, 2)", "float32 (5, 8)"],
            ["2", "Again", "float32 (5, 8)", "float32 (5, 3)"],
            ["2.body", "Linear", "float32 (5, 8)", "float32 (5, 3)"],
        ]
    ]
    rows = [["(model)", "Sequential", "float32 (5, 1, 6, 6)", "fails"]]
    rows += [["0", "Conv2d", "float32 (5, 1, 6, 6)", "float32 (5, 2, 4, 4)"]]
    rows += [["1", "Flatten", "float32 (5, 2, 4, 4)", "float32 (5, 32)"]]
    rows += [[name, kind, "float32 (5, 32)", "fails"] for name, kind in (("2", "Again"), ("2.body", "Linear"))]
    assert failed.value.__notes__ == ["shapes up to the module that fails\n" + "\n".join(aligned(COLUMNS, rows))]
    model(torch.zeros(1, 1, 4, 4))
    assert len(tables) == 1, "the hooks are gone"


def test_a_run_shows_the_table_and_ends_with_the_same_bits(train: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "max_steps=3", "data.batch_size=16", "transform=none")
    plain, looked_at = train(*words), train(*words, "debug=shapes")
    assert "shapes in the first batch" in looked_at.out
    assert "float32 (16, 1, 8, 8)" in looked_at.out
    assert "shapes in" not in plain.out
    assert looked_at.summary["weights_sha256"] == plain.summary["weights_sha256"]


def test_a_compiled_model_is_refused(problems: Any) -> None:
    assert problems("debug=shapes", "compile=true")["watch.shapes"].allowed == "compile=false"
    assert problems("debug=nan", "compile=true")["watch.finite"].allowed == "compile=false"
