"""Device, precision and torch's switches are what the config says, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runner.config.errors import UserError
from runner.runtime.device import choose_device, configure_torch
from runner.runtime.precision import choose_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.set_num_threads(threads)


def configure(**keys: object) -> list[str]:
    defaults = {"threads": 1, "deterministic": False, "cudnn_benchmark": False, "tf32": False, "detect_anomaly": False}
    return configure_torch(CPU, **{**defaults, **keys})  # type: ignore[arg-type]


def test_the_cpu_is_taken_when_asked_for() -> None:
    assert choose_device("cpu") == (CPU, "as set")


def test_auto_takes_what_is_there_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == (CPU, "auto: no accelerator found")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cdua", r"cannot be 'cdua'; did you mean 'cuda'\?\n.*allowed: auto, cpu"),
        ("cuda", "'cuda' is not there"),
        ("cuda:3", "'cuda:3' is not there"),
        ("mps", "'mps' is not there"),
        ("meta", "'meta' is not supported"),
        ("", "cannot be ''"),
    ],
)
def test_a_device_that_cannot_be_had_is_a_sentence(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"^device: .*{words}"):
        choose_device(name)


def test_an_index_beyond_the_last_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"torch sees 2\n.*cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_a_run_never_inherits_the_switches_of_the_one_before() -> None:
    configure(deterministic=True, detect_anomaly=True, cudnn_benchmark=False)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_anomaly_enabled()
    assert torch.backends.cudnn.deterministic
    configure(deterministic="warn")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.is_anomaly_enabled()
    configure()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.deterministic


def test_switches_of_cuda_are_reported_to_have_no_effect_elsewhere() -> None:
    warnings = configure(cudnn_benchmark=True, tf32=True)
    assert [warning.split("=")[0] for warning in warnings] == ["cudnn_benchmark", "tf32"]
    assert all("no effect on cpu" in warning for warning in warnings)
    assert configure() == []


@pytest.mark.parametrize(
    ("amp", "dtype", "scaled"),
    [
        (False, None, False),
        (True, torch.bfloat16, False),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, True),
    ],
)
def test_matrices_are_multiplied_in_the_precision_asked_for(amp: bool, dtype: torch.dtype | None, scaled: bool) -> None:
    precision = choose_precision(amp, CPU)
    with precision.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (dtype or torch.float32)
    assert (precision.scaler is not None) == scaled
    assert str(amp).lower() in precision.reason
