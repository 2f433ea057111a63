"""The presets of `debug` do what they say."""

from __future__ import annotations

from typing import Any

import pytest

from runner.config.load import problems_in
from runner.config.schema.train import Train

TINY = ("model=mlp", "model.hidden=[32]")


def test_smoke_does_everything_once(train: Any) -> None:
    """Also where a run would do without."""
    result = train(*TINY, "debug=smoke", "log.every_steps=1", "accumulate=2")
    assert result.summary["status"] == "finished"
    assert result.summary["global_step"] == 1
    assert [record["split"] for record in result.metrics] == ["train", "val", "test"]
    files = {path.name for path in (result.directory / "checkpoints").iterdir()}
    assert {"last.safetensors", "best.safetensors"} <= files


def test_smoke_evaluates_what_an_experiment_leaves_out(compose: Any, workdir: Any) -> None:
    (workdir / "mine" / "experiment").mkdir(parents=True)
    (workdir / "mine" / "experiment" / "quiet.yaml").write_text(
        "# @package _global_\nepochs: null\nmax_steps: 10000\nevaluate:\n  every_epochs: null\n  test: false\n"
    )
    values = compose("--config-dir", str(workdir / "mine"), "experiment=quiet", "debug=smoke").values
    assert (values["epochs"], values["limit"]["train_batches"]) == (1, 2)
    assert (values["evaluate"]["every_epochs"], values["evaluate"]["test"]) == (1, True)


def test_limit_trains_and_evaluates_on_few_batches(train: Any) -> None:
    result = train(*TINY, "debug=limit", "evaluate.batch_size=10")
    assert result.summary["global_step"] == 30
    accuracies = [record["accuracy"] for record in result.metrics if record["split"] == "val"]
    assert len(accuracies) == 3
    assert all(abs(accuracy * 50 - round(accuracy * 50)) < 1e-4 for accuracy in accuracies), "5 batches of 10"


def test_overfit_brings_the_loss_of_one_batch_close_to_zero(train: Any) -> None:
    result = train(*TINY, "debug=overfit", "data.batch_size=16", "epochs=120")
    losses = [record["loss"] for record in result.metrics if record["split"] == "train"]
    assert losses[-1] < 0.02 < losses[0]
    assert result.summary["global_step"] == 120


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        (["debug=smoke"], "_debug", "debug=smoke, limit.train_batches=2, limit.eval_batches=1"),
        (["debug=pdb", "max_steps=1"], "_debug", "debug=pdb"),
        (["limit.eval_batches=1", "max_steps=1"], "_limited", "limit.eval_batches=1"),
    ],
)
@pytest.mark.parametrize("word", ["last", "best"])
def test_the_newest_run_is_none_for_debugging(
    words: list[str], kind: str, reason: str, word: str, train: Any, accepted: Any, rejected: Any
) -> None:
    common = (*TINY, "epochs=1", "evaluate.test=false")
    debugged = train(*common, *words)
    assert (str(debugged.directory).endswith(kind), debugged.summary["not_last"]) == (True, reason)
    for verb in ("eval", "train"):
        alone = rejected(verb, f"ckpt_path={word}", "threads=1")
        assert f"the newest, {debugged.directory}, has {reason}" in alone.err
        assert f"allowed: ckpt_path={debugged.directory}, or another run" in alone.err
    # Limits come along with the checkpoint
    if kind == "_limited":
        continued = train(f"ckpt_path={debugged.directory}", "epochs=2")
        assert (continued.summary["not_last"], str(continued.directory).endswith(kind)) == (reason, True)
    assert "init_from: each run with a checkpoint" in rejected("train", *common, f"init_from={word}", "threads=1").err
    whole = train(*common, "max_steps=1")
    assert "not_last" not in whole.summary
    train(*common, *words)
    assert str(whole.directory / "checkpoints") in accepted("eval", f"ckpt_path={word}", "threads=1").out
    assert str(debugged.directory) in accepted("eval", f"ckpt_path={debugged.directory}", "threads=1").out


def test_anomaly_names_the_operation_behind_a_gradient_that_is_not_a_number(
    run: Any, workdir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "my_root.py").write_text(
        "from torch import nn\n\nclass Root(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10)\n\n    def forward(self, images):\n"
        "        return (self.layer(images.flatten(1)) * 0).sqrt() * 0\n"
    )
    (workdir / "mine" / "model").mkdir(parents=True)
    (workdir / "mine" / "model" / "root.yaml").write_text("_target_: my_root.Root\n")
    monkeypatch.syspath_prepend(str(workdir))
    result = run("train", "--config-dir", "mine", "model=root", "debug=anomaly", "threads=1", "logger=none", "epochs=1")
    assert result.status == 2
    assert "SqrtBackward0" in result.err
    assert "detect_anomaly" not in result.err, "it is on"


@pytest.mark.parametrize("option", ["pdb", "shapes", "nan"])
def test_presets_turn_on_one_key_and_leave_the_training_alone(option: str, compose: Any) -> None:
    plain, chosen = compose(), compose(f"debug={option}")
    assert chosen.group_choices["debug"] == option
    config, problems = problems_in(chosen.values, chosen, Train)
    assert not problems
    assert config is not None
    assert [config.post_mortem, config.watch.shapes, config.watch.finite].count(True) == 1
    values = chosen.values
    for key in ("post_mortem", "watch", "data"):
        plain.values.pop(key), values.pop(key)
    assert values == plain.values
