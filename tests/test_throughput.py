"""What log lines of training say about the machine, in runs of the whole program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.runtime.hardware_metrics import HardwareMetrics, asks_driver, choose_hardware_metrics
from runner.tracking.formats import metric

SMALL = (
    "data=synthetic", "data.dataset.samples=60", "data.image_size=8", "data.batch_size=8", "epochs=1", "model=small_cnn",
    "model.width=4", "model.dropout=0.3", "log.every_steps=2", "evaluate.test=false",
)  # fmt: skip


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has a listed peak."""
    ceiling = (1e12, "data sheet of a GPU")
    monkeypatch.setattr("runner.runtime.hardware_metrics.listed_peak", lambda name, kind: ceiling)


def test_every_training_line_has_throughput_waiting_and_memory(train: Any) -> None:
    lines = train(*SMALL).logged("train")
    assert lines
    for line in lines:
        assert line["samples_per_s"] > 0
        assert 0 <= line["data_wait"] <= 1
        assert 50 < line["peak_memory_mib"] < 100_000
        assert "mfu" not in line, "the peak of a CPU is not in the table"


def test_a_device_without_a_listed_peak_has_no_utilization_and_one_warning_if_asked_for(train: Any) -> None:
    results = {wanted: train(*SMALL, f"log.utilization={wanted}") for wanted in ("true", "auto", "false")}
    said = "log.utilization=true has no effect: no peak of cpu is listed for float32"
    assert {wanted: result.out.count("log.utilization") for wanted, result in results.items()} == {
        "true": 1, "auto": 0, "false": 0,
    }  # fmt: skip
    assert said in results["true"].out
    assert not any("mfu" in line for result in results.values() for line in result.logged("train"))


@pytest.mark.usefixtures("listed")
def test_a_listed_peak_has_its_utilization_logged_and_changes_no_bit(train: Any) -> None:
    results = {wanted: train(*SMALL, f"log.utilization={wanted}") for wanted in ("true", "auto", "false")}
    assert len({result.summary["weights_sha256"] for result in results.values()}) == 1
    assert len({str(result.summary["best"]) for result in results.values()}) == 1
    for wanted, result in results.items():
        assert all(("mfu" in line) == (wanted != "false") for line in result.logged("train"))
        assert ("FLOP a sample" in result.out) == ("data sheet of a GPU" in result.out) == (wanted != "false")
    assert all(0 < line["mfu"] < 1 for line in results["auto"].logged("train"))


def test_a_gpu_that_is_not_listed_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T1000")
    warnings: list[str] = []
    found = choose_hardware_metrics("auto", torch.device("cuda", 0), "fp16", lambda: pytest.fail("counted"), warnings)
    assert found.rows() == []
    assert warnings == ["log.utilization=auto has no effect: no peak of NVIDIA T1000 is listed for fp16"]


def test_utilization_is_the_work_that_is_done_over_what_could_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = (1e12, "")
    figures = HardwareMetrics(torch.device("cpu"), 2e9, ceiling)(100.0)
    assert figures["mfu"] == pytest.approx(0.2)
    assert set(HardwareMetrics(torch.device("cpu"))(100.0)) == {"peak_memory_mib"}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    assert HardwareMetrics(torch.device("cuda", 0))(1.0) == {"peak_memory_mib": 3.0}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose driver answers; there is none here."""
    for name, value in {"utilization": 90, "power_draw": 312_000, "device_memory_used": 3 * 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)


@pytest.mark.usefixtures("driver")
def test_log_lines_and_summary_say_how_busy_a_gpu_is(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert asks_driver("auto", cuda)
    assert not asks_driver("auto", torch.device("cpu"))
    assert not asks_driver(False, cuda)
    monkeypatch.setattr("runner.run.run.asks_driver", lambda wanted, device: asks_driver(wanted, cuda))
    result, without = train(*SMALL), train(*SMALL, "log.device=false")
    use = {"device_busy": 0.9, "device_memory_mib": 3072.0, "device_power_w": 312.0}
    assert all({name: line[name] for name in use} == use for line in result.logged("train"))
    assert not any(use.keys() & line.keys() for line in without.logged("train"))
    assert result.summary["device_busy"] == 0.9
    assert "device_busy" not in without.summary
    assert "device busy 90% during training" in result.out
    assert [metric(*each) for each in use.items()] == [
        "device busy 90%",
        "device memory 3,072 MiB",
        "device power 312 W",
    ]
    assert result.summary["weights_sha256"] == without.summary["weights_sha256"]


def test_a_device_whose_use_cannot_be_read_is_a_mistake_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, rejected: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: (_ for _ in ()).throw(ModuleNotFoundError("pynvml")))
    assert not asks_driver("auto", torch.device("cuda", 0))
    assert "log.device: the use of cpu cannot be read" in rejected("train", *SMALL, "log.device=true").err


def test_a_model_that_cannot_be_counted_is_a_mistake_if_asked_for_and_a_warning_if_not(
    accepted: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch, listed: None
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no formula\nand more")

    monkeypatch.setattr("runner.run.run.count_flops", refuse)
    words = ("train", "threads=1", "logger=none", *SMALL)
    asked = rejected(*words, "log.utilization=true")
    assert "log.utilization: the operations of this model cannot be counted: no formula" in asked.err
    assert "allowed: log.utilization=false" in asked.err
    warned = accepted(*words)
    assert "warning: log.utilization=auto has no effect" in warned.out
