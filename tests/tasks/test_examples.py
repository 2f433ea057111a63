"""The examples of `scripts/examples`: each trains, and one that is killed within an epoch ends in the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_runs import RUNS, prepare
from extended import some
from PIL import Image
from torch import Tensor

from runner.config.schema.verbs import Predict
from runner.instrument.nested import tensors_moved
from runner.run.from_checkpoint import MODEL, resolve_checkpoint
from runner.run.model import modules_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = sorted(RUNS)
CONF = f"--config-dir={SCRIPTS / 'examples' / 'conf'}"
# Those whose task has a `predict_step`.
PREDICTING = [name for name in NAMES if not name.startswith(("mnist", "regression"))]


@pytest.fixture(autouse=True)
def examples(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples can be imported, and what they read is there."""
    monkeypatch.setenv("RUNNER_TRUST", "examples")
    monkeypatch.syspath_prepend(SCRIPTS)
    prepare(workdir)


@pytest.mark.parametrize("name", some(NAMES, NAMES.index("vae")))
def test_an_example_that_is_killed_ends_in_the_bits_of_one_that_is_not(
    name: str, train: Callable[..., Any], killed: Callable[..., Path]
) -> None:
    words = (CONF, f"experiment={name}", *RUNS[name])
    whole = train(*words)
    assert whole.summary["global_step"] > 5
    directory = killed(2, *words, "checkpoint.every_steps=1")
    resumed = train(CONF, f"ckpt_path={directory}", "callbacks=none", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.summary.get("test") == whole.summary.get("test")


@pytest.mark.parametrize("name", some(PREDICTING, PREDICTING.index("vae")))
def test_predict_writes_what_the_task_of_an_example_computes(
    name: str, train: Callable[..., Any], accepted: Callable[..., Any], compose: Callable[..., Any]
) -> None:
    directory = train(CONF, f"experiment={name}", *RUNS[name], "max_steps=3").directory
    words, cpu = (f"ckpt_path={directory}", "data.num_workers=0"), torch.device("cpu")
    resolved = resolve_checkpoint(compose(*words, verb="predict"), Predict, MODEL)
    data = resolved.data(cpu)
    name, split = next((name, split) for name in ("val", "test") if (split := data.eval_split(name)))
    accepted("predict", *words, f"input={name}", "output=rows.jsonl")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]

    task: Any
    task, modules = resolved.restore_model(data, cpu)
    modules.to(getattr(torch, resolved.config.dtype))
    loader, first, named = split.loader, 0, {"path"} if hasattr(data.parts[name][0], "path") else set[str]()
    for number, batch in enumerate(loader.batches(0, 0, -(-loader.samples // loader.batch_size))):
        torch.manual_seed(number)
        with torch.inference_mode():
            expected = tensors_moved(task.predict_step(modules_of(modules, torch.nn.Identity()), batch.data), "cpu")
        for place in range(len(batch.indices)):
            row = rows[first + place]
            assert row.keys() == {"sample", *named, *expected}
            for key, values in expected.items():
                agrees(row[key], values[place])
        first += len(batch.indices)
    assert first == len(rows) > 0


def agrees(cell: Any, value: Any) -> None:
    """Check that a cell has a value, or names a file that does."""
    if not isinstance(value, Tensor):
        assert cell == value
    elif value.dtype == torch.uint8 and value.ndim > 1:
        with Image.open(cell) as image:
            pixels = torch.from_numpy(np.array(image))
        assert pixels.equal(value if value.ndim == 2 else value.permute(1, 2, 0).squeeze(2))
    else:
        assert torch.tensor(cell, dtype=value.dtype).reshape(value.shape).equal(value)


def test_the_transformer_of_words_learns(train: Callable[..., Any]) -> None:
    words = (CONF, "experiment=word_language_model", *RUNS["word_language_model"], "model=word_transformer")
    # The text is a page of the documentation, which changes: at a low rate, the loss falls from one evaluation to the next
    found = train(*words, "optimizer.lr=0.1", "epochs=4").metrics
    first, *_, last = (line["loss"] for line in found if line["split"] == "val")
    assert last < first - 0.1


def test_the_files_of_cora_are_read(workdir: Path) -> None:
    from examples.gcn import cora

    (workdir / "cora").mkdir()
    (workdir / "cora" / "cora.content").write_text("31 0 1 1 Theory\n7 1 0 0 Rules\n100 1 1 1 Theory\n9 0 0 0 Genes\n")
    (workdir / "cora" / "cora.cites").write_text("31 7\n31 100\n7 100\n")  # the cited paper comes first
    found = cora(str(workdir), download=False, sizes=[2, 1], seed=0)
    assert list(found) == ["test", "val", "train"]
    masks = torch.stack([found[split][0]["mask"] for split in found])
    assert masks.sum(1).tolist() == [2, 1, 1]
    assert masks.sum(0).tolist() == [1] * 4
    [graph] = found["train"]
    third = 1 / 3
    features = torch.tensor([[0, 0.5, 0.5], [1, 0, 0], [third, third, third], [0, 0, 0]])
    torch.testing.assert_close(graph["features"], features)
    assert graph["labels"].tolist() == [2, 1, 2, 0]
    links = torch.tensor([[1.0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    sums = links.sum(1)
    torch.testing.assert_close(graph["links"], links / (sums[:, None] * sums).sqrt())


def test_every_example_has_a_short_run() -> None:
    experiments = {path.stem for path in (SCRIPTS / "examples" / "conf" / "experiment").glob("*.yaml")}
    assert experiments == {*RUNS}
