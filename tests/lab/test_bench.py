"""`bench` finds what pays on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.schema.verbs import Bench
from runner.data.workers import WorkerLoader
from runner.lab.bench import Candidate, candidates, compare, recommended
from runner.lab.short_runs import Stopwatch
from runner.tracking.verb_report import Report

PARTS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, image_size, steps_with_amp, broken):
        super().__init__()
        self.layer, self.steps_with_amp, self.broken = nn.Conv2d(3, num_classes, image_size), steps_with_amp, broken

    def forward(self, images):
        fast = torch.is_autocast_enabled("cpu")
        self.steps_with_amp -= fast and self.training
        if self.steps_with_amp < 0:
            raise RuntimeError("no memory is left, say")
        logits = self.layer(images).flatten(1)
        return logits / 0 if self.broken and fast else logits
"""
CALL = (
    *("bench", "threads=1", "data=synthetic", "data.image_size=8", "data.batch_size=8", "transform=none"),
    *("repeats=3", "steps=5", "--config-dir", "mine", "model=failing"),
)
OPTION = "# Fails with amp.\n_target_: bench_parts.Net\nsteps_with_amp: 1000\nbroken: false\n"

Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def parts(workdir: Path, own_module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, and measurements as short as their steps."""
    monkeypatch.setattr("runner.lab.bench._LEAST_S", 0.0)
    own_module("bench_parts", PARTS)
    (workdir / "mine" / "model").mkdir(parents=True)
    (workdir / "mine" / "model" / "failing.yaml").write_text(OPTION)


@pytest.fixture
def bench(
    json_of: Callable[..., Any], parts: None, short_runs_forked: None, monkeypatch: pytest.MonkeyPatch
) -> Measured:
    """What `bench` finds out about the model: `bench("toggles=[]", "vary.amp=[bf16]")`."""
    monkeypatch.setattr("runner.lab.bench.bars", lambda *_, **__: None)

    def call(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json_of(*CALL, *words)
        assert not [*Path("outputs").glob("synthetic/*")], "the measured runs are not kept"
        return found | {"by_name": {" ".join(each["overrides"]): each for each in found.get("candidates", [])}}

    return call


def reasons(found: dict[str, Any]) -> dict[str, str]:
    return {each["what"]: each["why"] for each in found["left_out"]}


def test_people_get_a_table_a_picture_and_the_recommendation_before_the_folder(
    accepted: Any, parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(config: Bench, workers: int | None, candidate: Candidate, most_s: float | None) -> float:
        candidate.speeds.append(2.0 if candidate.words else 1.0)
        candidate.step_ms.append(8000 / candidate.speeds[-1])
        return 1.0

    monkeypatch.setattr("runner.lab.bench._measure", measure)
    result = accepted(*CALL, "toggles=[channels_last,tf32]")
    *lines, last_but_one, last = result.out.strip().splitlines()
    assert last_but_one == "recommended: channels_last=true"
    folder = Path(last)
    assert folder.parent == Path("outputs/benchmarks")
    assert any(line.startswith("as configured") for line in lines)
    assert any(line.startswith("tf32") and "setting of CUDA's" in line for line in lines)
    written = json.loads((folder / "bench.json").read_text())
    assert written["recommended"] == ["channels_last=true"]
    assert written["environment"]["torch"]["version"] == torch.__version__
    with Image.open(folder / "bench.png") as picture:
        picture.verify()


AMP, OTHER = {"amp": True}, {"amp": True, "data.batch_size": 8}


@pytest.mark.parametrize(
    ("ratios", "settings", "verdict"),
    [
        ((1.03, 1.2, 1.02), AMP, ""),
        ((1.5, 1.5, 0.99), AMP, "no clear gain"),
        ((1.01, 1.01, 1.01), AMP, "no clear gain"),
        ((0.5, 0.9, 0.99), AMP, "slower"),
        ((2.0, 2.0, 2.0), OTHER, "another training"),
    ],
)
def test_a_toggle_pays_if_it_is_faster_in_every_round_and_by_two_percent_in_the_median(
    ratios: tuple[float, ...], settings: dict[str, Any], verdict: str
) -> None:
    assert Candidate("toggle", settings, ratios=[*ratios]).verdict == verdict


def test_the_fastest_toggle_that_pays_is_recommended_by_its_ratio_to_the_baseline_of_the_same_round() -> None:
    speeds = {"as configured": [10.0, 20.0, 5.0], "amp=true": [12.0, 23.0, 5.5], "tf32=true": [13.0, 30.0, 6.0],
              "compile=true": [90.0, 10.0, 90.0], "amp=true data.batch_size=8": [99.0, 99.0, 99.0]}  # fmt: skip

    def measure(candidate: Candidate, most_s: float | None) -> float:
        candidate.speeds.append(speeds[candidate.name][len(candidate.speeds)])
        assert most_s == (None if candidate.kind == "baseline" else 10.0), "five times as long as the baseline"
        return 2.0

    tried = [Candidate("toggle", settings) for settings in (AMP, {"tf32": True}, {"compile": True}, OTHER)]
    config: Any = SimpleNamespace(budget_s=300.0, repeats=3)
    measured, notes = compare(config, tried, {}, measure, Report(as_json=True))
    assert [each.ratio for each in measured] == [1, 1.15, 1.3, 9, 19.8 / 2]
    assert [each.verdict for each in measured] == ["", "", "", "no clear gain", "another training"]
    assert recommended(measured).words == ["tf32=true"]
    assert recommended([measured[0], *measured[3:]]).words == notes == []


@pytest.mark.extended
def test_candidates_that_cannot_be_run_are_listed_with_the_reason_and_the_others_continue(bench: Measured) -> None:
    found = bench(
        *("toggles=[]", "vary.data.batch_size=[0]", "vary.model.pause=[1]", "vary.data.placement=[elsewhere]"),
        *("vary.optimizer.fused=[false]", "vary.amp=[bf16]", "model.steps_with_amp=12", "vary.grad_clip.norm=[-1]"),
    )
    why = reasons(found)
    assert why["data.batch_size=0"].startswith("data.batch_size: cannot be 0")
    assert "is not an argument of bench_parts.Net" in why["model.pause=1"]
    assert "elsewhere" in why["data.placement=elsewhere"]
    assert "grad_clip.norm" in why["grad_clip.norm=-1"]
    assert sorted(found["by_name"]) == ["amp=bf16", "optimizer.fused=false"]
    for each in (found["baseline"], found["by_name"]["amp=bf16"]):
        assert (len(each["ratios"]), each["peak_memory_bytes"] > 2**20) == (3, True)
        assert each["samples_per_s"]["median"] * each["step_ms"]["median"] == pytest.approx(8 * 1000, rel=0.5)
    failing = bench("toggles=[]", "vary.amp=[bf16]", "model.steps_with_amp=4")
    assert reasons(failing) == {"amp=bf16": "RuntimeError: no memory is left, say"}
    assert failing["recommended"] == []


def test_a_run_whose_loss_is_not_finite_is_listed(bench: Measured) -> None:
    found = bench("toggles=[]", "vary.amp=[bf16]", "model.broken=true")
    assert "finite" in reasons(found)["amp=bf16"]


@pytest.mark.parametrize(("least_s", "most_s", "steps"), [(0.0, None, 4), (1.0, None, 8), (0.0, 0.3, 3), (1.0, 0.9, 8)])
def test_a_measurement_has_its_steps_more_where_they_are_short_and_fewer_where_they_are_long(
    least_s: float, most_s: float | None, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked, target = [0.0], list[str](), tmp_path / "measured.json"
    monkeypatch.setattr("runner.lab.short_runs.time.perf_counter", lambda: now[0])
    meter = SimpleNamespace(meter=SimpleNamespace(device=torch.device("cpu")))
    loop: Any = SimpleNamespace(state=meter, samples_seen=0, request_stop=asked.append)
    stopwatch = Stopwatch(4, warmup=2, least_s=least_s, most_s=most_s, target=str(target))
    stopwatch.on_start(loop)
    while not asked:
        now[0] += 0.125
        loop.samples_seen += 8
        stopwatch.on_step(loop)
    stopwatch.on_end(loop)
    found = json.loads(target.read_text())
    assert (found["steps"], found["samples"], found["seconds"]) == (steps, 8 * steps, 0.125 * steps)


def test_after_the_time_is_over_no_candidate_and_no_further_round_begins(bench: Measured) -> None:
    found = bench("toggles=[channels_last]", "budget_s=0.001", "repeats=4")
    assert "no time was left" in reasons(found)["channels_last=true"]
    assert found["notes"] == ["3 rounds instead of 4, because time ran out; a larger budget_s allows more"]
    assert len(found["baseline"]["ratios"]) == 3


@pytest.mark.extended
def test_the_config_of_a_checkpoint_of_a_finished_run_is_measured_with_the_words_on_top(
    train: Any, accepted: Any, short_runs_forked: None
) -> None:
    trained = train(
        "data=synthetic", "data.image_size=8", "model=mlp", "model.hidden=[7]", "max_steps=1", "epochs=null"
    )
    words = ("threads=1", "toggles=[]", "vary.seed=[1]", "repeats=2", "steps=3")
    result = accepted("bench", f"ckpt_path={trained.directory}", *words)
    assert "MLP, 1,431 parameters" in result.out
    assert "another training" in result.out


@pytest.mark.extended
def test_the_jobs_of_a_sweep_write_into_its_folder(bench: Measured, accepted: Any) -> None:
    accepted(*CALL, "--multirun", "toggles=[]", "seed=0,1")
    [sweep] = Path("outputs/benchmarks").iterdir()
    for job in ("0", "1"):
        assert json.loads((sweep / job / "bench.json").read_text())["recommended"] == []


class Built(SimpleNamespace):
    """What a built run says of itself, on a machine with 6 cores, of which torch uses 4."""

    def __init__(self, device: str = "cpu", dtype: Any = None, *, workers: int | None = None, **kernels: bool) -> None:
        super().__init__(device=torch.device(device), precision=SimpleNamespace(dtype=dtype), model=nn.Conv2d(1, 1, 1))
        self.kernels = SimpleNamespace(arguments=kernels or {"fused": False, "foreach": False})
        loader = None if workers is None else object.__new__(WorkerLoader)
        if loader is not None:
            loader.workers = workers
        self.data = SimpleNamespace(train=SimpleNamespace(loader=loader))


CPU, CUDA, WORKERS = Built(), Built("cuda", fused=True, foreach=False), Built(workers=2)
FUSED = "optimizer.fused=true optimizer.foreach=false"

Tried = Callable[..., tuple[dict[str, Candidate], dict[str, str]]]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.lab.bench.cores", lambda: 6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.fixture
def tried(compose: Callable[..., Composition]) -> Tried:
    """Candidates by name, and what was skipped with the reason: `tried(CPU, amp=True)`."""

    def call(built: Any, *words: str, **changes: Any) -> tuple[dict[str, Candidate], dict[str, str]]:
        composition = compose(*words, verb="bench")
        config = resolve_config(composition, Bench)
        optimizer = config.optimizer | changes.pop("optimizer", {})
        changed = dataclasses.replace(config, optimizer=optimizer, **changes)
        found, left_out = candidates(changed, built, composition.sources)
        return {candidate.name: candidate for candidate in found}, left_out

    return call


LINEAR = Built(foreach=False)
LINEAR.model = nn.Linear(1, 1)
FAST = {"dtype": torch.bfloat16, "fused": True, "foreach": False}
# What is built, the config, names that are tried, how names begin that are not (None: all others), what does not apply
TRIED: dict[str, tuple[Built, dict[str, Any], set[str], tuple[str, ...] | None, set[str]]] = {
    "each toggle that applies to the CPU, and compiling only if asked for": (
        CPU, {},
        {"amp=bf16", "amp=fp16", "channels_last=true", FUSED, "performance=fast", "threads=1", "threads=2", "threads=6",
         "data.placement=disk"},
        ("compile", "tf32", "cudnn", "threads=4", "performance=baseline", "amp=false", "performance=max"),
        {"compile", "tf32", "cudnn_benchmark", "performance=max", "data.num_workers"},
    ),
    "compiling, if asked for": (
        CPU, {"toggles": ["compile", "performance"]},
        {"compile=true", "compile=step", "performance=max", "performance=fast"}, ("amp", "threads", "tf32", "data"), set(),
    ),
    "no preset that changes nothing": (CPU, {"amp": "auto", "channels_last": True}, set(), ("performance=fast",), set()),
    "toggles of CUDA": (
        CUDA, {},
        {"compile=true", "tf32=true", "cudnn_benchmark=true", "performance=max",
         "data.placement=disk", "data.placement=ram", "data.placement=device"},
        (), {"threads"},
    ),
    "what is on already, off": (
        Built(**FAST), {"amp": True, "channels_last": True, "optimizer": {"fused": True}, "compile": True},
        {"amp=false", "amp=fp16", "channels_last=false", "optimizer.fused=false", "compile=false", "compile=step",
         "optimizer.foreach=true optimizer.fused=false", "activation_checkpointing=true", "performance=baseline"},
        ("amp=bf16", "channels_last=true", "compile=true"), set(),
    ),
    "a compiled step": (Built(**FAST), {"compile": "step"}, {"compile=false"}, (), set()),
    "some toggles": (CPU, {"toggles": ["amp", "optimizer.fused"]}, {"amp=bf16", "amp=fp16", FUSED}, None, set()),
    "no toggles": (CPU, {"toggles": []}, set(), None, set()),
    "only what optimizer and model take": (
        LINEAR, {}, {"optimizer.foreach=true"}, ("channels_last", "optimizer.fused"), {"channels_last", "optimizer.fused"},
    ),
    "workers where samples are read one by one": (
        WORKERS, {"toggles": ["data.num_workers", "data.placement"]},
        {f"data.num_workers={count}" for count in (0, 1, 4, 6)}, None, {"data.placement"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TRIED)
def test_what_applies_is_tried_and_what_does_not_is_named(what: str, tried: Tried) -> None:
    built, changes, names, absent, inapplicable = TRIED[what]
    found, left_out = tried(built, **changes)
    assert names <= set(found)
    assert absent is not None or set(found) == names
    assert not [name for name in found if name.startswith(absent or ())]
    assert inapplicable <= set(left_out)
    assert absent is not None or set(left_out) == inapplicable


def test_samples_that_are_read_by_workers_may_lie_in_memory_where_nobody_asked_for_the_disk(tried: Tried) -> None:
    names, _ = tried(WORKERS, "data.placement=disk", "data.num_workers=2")
    assert {"data.num_workers=0", "data.placement=ram data.num_workers=auto"} <= names.keys()
    assert "data.num_workers=2" not in names


@pytest.mark.parametrize(
    "word", ["vary.data.batch_size=[64,128,256]", "vary={data.batch_size:[64,128,256]}"], ids=["dotted", "mapping"]
)
def test_further_keys_are_varied_in_either_spelling(word: str, tried: Tried) -> None:
    found, _ = tried(CPU, word, toggles=[])
    assert set(found) == {"data.batch_size=128", "data.batch_size=256"}, "64 is what is configured"
    varied, _ = tried(CPU, toggles=[], vary={"optimizer": {"fused": [False, True]}})
    assert set(varied) == {"optimizer.fused=false", "optimizer.fused=true"}


def test_an_own_preset_is_tried(tried: Tried, workdir: Path) -> None:
    folder = workdir / "mine" / "performance"
    folder.mkdir(parents=True)
    (folder / "lean.yaml").write_text("# @package _global_\n# Mine.\namp: bf16\noptimizer:\n  fused: true\n")
    own = tried(CPU, "--config-dir", "mine")[0]["performance=lean"]
    assert dict(own.settings) == {"amp": "bf16", "optimizer.fused": True}
    own.ratios = [2.0]
    assert own.verdict == ""
