"""Device, precision and torch's switches are what the config says, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.base.cores import cores
from runner.base.errors import UserError
from runner.runtime.device import choose_device, configure_torch, missing_compiler
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
    torch.set_float32_matmul_precision("highest")


def configure(device: torch.device = CPU, **keys: object) -> list[str]:
    defaults = {"threads": 1, "deterministic": False, "cudnn_benchmark": False, "tf32": False, "detect_anomaly": False}
    config = SimpleNamespace(**{"matmul_precision": None, **defaults, **keys})
    return configure_torch(config, device)  # type: ignore[arg-type]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def there(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return there


def test_auto_takes_what_is_there_and_says_why(gpus: Callable[[int], None]) -> None:
    gpus(0)
    assert choose_device("cpu") == (CPU, "as set")
    assert choose_device("auto") == (CPU, "auto: no accelerator found")


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("cdua", 0, r"cannot be 'cdua'; did you mean 'cuda'\?\n.*allowed: auto, cpu"),
        ("cuda", 0, "'cuda' is not available"),
        ("cuda:3", 0, "'cuda:3' is not available"),
        ("cuda:2", 2, r"'cuda:2' is not available: torch sees 2\n.*cuda:0 to cuda:1"),
        ("mps", 0, "'mps' is not available"),
        ("meta", 0, "cannot be 'meta'"),
        ("", 0, "cannot be ''"),
    ],
)
def test_a_device_that_cannot_be_had_is_a_sentence(
    name: str, count: int, words: str, gpus: Callable[[int], None]
) -> None:
    gpus(count)
    with pytest.raises(UserError, match=f"^device: .*{words}"):
        choose_device(name)


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


def test_the_precision_of_products_is_set_and_never_inherited() -> None:
    for precision in ("high", "medium"):
        configure(matmul_precision=precision)
        assert torch.get_float32_matmul_precision() == precision
    configure(tf32=True)
    assert torch.get_float32_matmul_precision() == "highest", "TensorFloat-32 is CUDA's"


def test_a_precision_that_makes_no_difference_here_is_said() -> None:
    matrix = torch.linspace(-1, 1, 256 * 256).view(256, 256)
    exact = matrix @ matrix
    for precision in ("high", "medium"):
        said = configure(matmul_precision=precision)
        same = torch.equal(matrix @ matrix, exact)
        assert [warning.split(":")[0] for warning in said] == (
            [f"matmul_precision={precision} has no effect on this cpu"] if same else []
        )
    assert configure(matmul_precision="highest") == []


def test_more_threads_than_cores_are_said() -> None:
    usable = cores()
    assert configure(threads=usable) == []
    (said,) = configure(threads=usable + 1)
    assert said.startswith(f"threads={usable + 1} is more than the {usable} available CPU cores")


def test_tensorfloat_on_a_gpu_without_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    (said,) = configure(torch.device("cuda", 0), tf32=True)
    assert said.startswith("tf32=true has no effect: this GPU has no TensorFloat-32")
    assert torch.get_float32_matmul_precision() == "high"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert configure(torch.device("cuda", 0), tf32=True) == []
    torch.backends.cudnn.allow_tf32 = allow
    configure()


@pytest.mark.parametrize(
    ("device", "capability", "tools", "words"),
    [
        ("cpu", None, "", "needs a C++ compiler on the CPU"),
        ("cpu", None, "g++", ""),
        ("cuda", (6, 1), "gcc triton", "needs a GPU of compute capability 7.0"),
        ("cuda", (9, 0), "triton", "needs a C compiler, with which Triton builds its launchers"),
        ("cuda", (9, 0), "gcc", "needs Triton on CUDA"),
        ("cuda", (7, 0), "gcc triton", ""),
        ("mps", None, "", ""),
    ],
)
def test_what_compiling_lacks_is_told_apart(
    device: str, capability: Any, tools: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools.split() else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in tools.split() else None)
    assert missing_compiler(torch.device(device)) == words


def capable(*names: str) -> Callable[[], dict[str, bool]]:
    return lambda: {name: name in names for name in ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")}


def test_sixteen_bits_that_are_emulated_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", capable(), raising=False)
    for amp, kind in ((True, "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        precision = choose_precision(amp, CPU)  # type: ignore[arg-type]
        assert [warning.split(":")[0] for warning in precision.warnings] == [f"amp={kind}"]
        assert "emulates" in precision.warnings[0]
        assert "amp=bf16" not in precision.warnings[0].split(":")[1]
    assert choose_precision(True, CPU).reason == "amp=true: cpu emulates bf16"
    monkeypatch.setattr(torch.cpu, "get_capabilities", capable("avx512_bf16"), raising=False)
    assert choose_precision(True, CPU).warnings == []
    assert "amp=bf16 or amp=false" in choose_precision("fp16", CPU).warnings[0]
    monkeypatch.setattr(torch.cpu, "get_capabilities", capable("amx_bf16", "amx_fp16"), raising=False)
    assert choose_precision("fp16", CPU).warnings == []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "unknown"}, raising=False)
    assert choose_precision("fp16", CPU).warnings == [], "nothing is said where nothing is known"


@pytest.mark.parametrize(
    ("units", "dtype", "reason"),
    [
        (("amx_bf16", "avx512_bf16"), torch.bfloat16, "amp=auto: cpu has bf16"),
        (("avx512_bf16",), None, "amp=auto: this cpu is not known to have units for matrices of 16 bits"),
        ((), None, "amp=auto: this cpu is not known to have units"),
    ],
)
def test_auto_computes_in_16_bits_only_where_that_is_faster(
    units: tuple[str, ...], dtype: torch.dtype | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", capable(*units), raising=False)
    precision = choose_precision("auto", CPU)
    assert precision.dtype == dtype
    assert precision.reason.startswith(reason)
    assert precision.warnings == []


@pytest.mark.parametrize(
    ("amp", "capability", "dtype", "warnings"),
    [
        ("auto", (6, 1), None, 0),
        ("auto", (7, 5), torch.float16, 0),
        ("auto", (8, 0), torch.bfloat16, 0),
        (True, (7, 5), torch.float16, 0),  # which emulates bf16
        (True, (8, 0), torch.bfloat16, 0),
        ("bf16", (7, 5), torch.bfloat16, 1),
        ("bf16", (8, 0), torch.bfloat16, 0),
    ],
)
def test_a_gpu_computes_in_what_its_generation_has(
    amp: Any, capability: tuple[int, int], dtype: torch.dtype | None, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = capability >= (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    precision = choose_precision(amp, torch.device("cuda"))
    assert (precision.dtype, len(precision.warnings)) == (dtype, warnings)


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
