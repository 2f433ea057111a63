"""Peaks come from data sheets, other devices have none; and a run on a busy machine says that its speed is not to be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_runs import TINY

from runner.runtime.hardware_metrics import kind_of, listed_peak

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "kind", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "float32", 67),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "tf32", 183),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "float32", 8.1),
    ],
)
def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(name: str, kind: str, tera: float) -> None:
    found = listed_peak(name, kind)  # type: ignore[arg-type]
    assert found == (tera * 1e12, f"data sheet of {name}, dense {kind}")


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA T400",
     "NVIDIA GeForce RTX 4090 D", "AMD Instinct MI300X", "NVIDIA A1000", "cpu"],
)  # fmt: skip
def test_a_gpu_that_only_resembles_a_known_one_has_no_listed_peak(name: str) -> None:
    assert listed_peak(name, "fp16") is None


def test_gpus_without_the_units_say_so_by_their_peak() -> None:
    assert listed_peak("Tesla T4", "tf32") == (8.1e12, "data sheet of Tesla T4, dense float32")
    assert listed_peak("Tesla V100-SXM2-16GB", "bf16") is None


def test_the_kind_is_what_products_are_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(torch.bfloat16, CUDA) == "bf16"
    assert kind_of(torch.float16, CPU) == "fp16"
    assert kind_of(None, CUDA) == "float32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert kind_of(None, CUDA) == "tf32"
    assert kind_of(None, CPU) == "float32"


@pytest.mark.parametrize(
    "words",
    [("train",), ("profile", "steps=1", "trace_steps=0")],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_busy_machine_is_named_in_one_line_at_the_end(
    words: tuple[str, ...], share: float, run: Callable[..., Any], workdir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What imports the function comes first: an import after the change would keep it
    for module in ("run.run_directory", "lab.profile", "runtime.hardware_metrics"):
        monkeypatch.setattr(f"runner.{module}.waited_for_core", lambda: share * time.perf_counter())
    done = run(*words, *TINY)
    assert done.status == 0, done.err
    said = [line for line in done.out.splitlines()[-6:] if "the machine was busy" in line]
    assert len(said) == (share >= 0.3)
    assert all("50% of the time" in line for line in said)
