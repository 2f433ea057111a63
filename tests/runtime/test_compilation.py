"""What is compiled is the same model under the same names, and what compiling cost and could not do is reported.

Compiling by Inductor takes seconds; most of this runs on torch's backends that only trace.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.schema.sections import Compiler
from runner.models.vit import ViT
from runner.runtime import toggles
from runner.runtime.toggles import Compilation, compile_learner, compile_optimizer

CPU = torch.device("cpu")

# Of torch's own looking through what it resumes with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by tracing alone, without a compiler."""
    plain = torch.compile
    torch._dynamo.reset()  # else what an earlier test compiled is found again

    def tracing(function: Any, mode: str | None = None, **options: Any) -> Any:
        return plain(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", tracing)
    monkeypatch.setattr(toggles, "missing_compiler", lambda device: "")


def loop_at(step: int) -> Any:
    return SimpleNamespace(state=SimpleNamespace(position=SimpleNamespace(global_step=step)), paused_s=0.0)


class Talkative(nn.Module):
    """Does something in its forward that cannot be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        torch._dynamo.graph_break("on purpose")
        return hidden * 2


@pytest.mark.usefixtures("traced")
def test_equal_blocks_are_compiled_once() -> None:
    model = ViT(1, (8, 8), 5, dim=12, heads=3, depth=3)
    plain = copy.deepcopy(model)
    done = compile_learner(model, nn.CrossEntropyLoss(), CPU, "blocks", Compiler())
    images = torch.ones(2, 1, 8, 8)
    torch.testing.assert_close(model(images), plain(images))
    done.on_step(loop_at(1))
    assert done.spent()[1] == 1
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_model_without_blocks_cannot_be_compiled_by_blocks() -> None:
    with pytest.raises(UserError, match="is blocks, and Linear repeats no block"):
        compile_learner(nn.Linear(2, 2), nn.CrossEntropyLoss(), CPU, "blocks", Compiler())


@pytest.mark.usefixtures("traced")
def test_compiling_is_timed_and_reported_in_one_line() -> None:
    model = Talkative()
    names = list(model.state_dict())
    lines: list[str] = []
    report, loop = compile_learner(model, nn.CrossEntropyLoss(), CPU, "model", Compiler()), loop_at(1)
    report.line = lines.append
    assert report.summary() == {"compile_s": 0.0, "graph_breaks": 0, "recompilations": 0}
    targets = torch.tensor([0, 1])
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.ones(2, 3)), targets).backward()  # type: ignore[no-untyped-call]
        report.on_step(loop)
    assert list(model.state_dict()) == names
    (line,) = lines
    assert line.startswith("compiled in ")
    assert " s by the end of step 1: 2 graphs, 1 graph break; TORCH_LOGS=" in line
    summary = report.summary()
    assert 0 < summary["compile_s"] == pytest.approx(loop.paused_s, abs=1e-3)
    assert summary["graph_breaks"] == 1
    model(torch.ones(5, 3))
    report.on_evaluation(loop, {})
    assert report.summary()["recompilations"] >= 1
    assert summary["compile_s"] < report.summary()["compile_s"] == pytest.approx(loop.paused_s, abs=1e-3)
    assert len(lines) == 1


@pytest.mark.usefixtures("traced")
def test_a_meter_counts_its_own_run_alone() -> None:
    def double(inputs: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inputs * 2

    torch.compile(double)(torch.ones(3))
    meter = Compilation("model", Compiler())
    assert meter.spent() == (0.0, 0, 0)
    assert meter.summary()["recompilations"] == 0
    torch.compiler.reset()
    meter = Compilation("model", Compiler())
    torch.compile(double)(torch.ones(4))
    assert meter.spent()[0] > 0, "after a reset of the compiler too"


@pytest.mark.usefixtures("traced")
def test_a_graph_that_must_be_whole_and_is_not_is_a_sentence() -> None:
    model = Talkative()
    compile_learner(model, nn.CrossEntropyLoss(), CPU, "model", Compiler(fullgraph=True))
    with pytest.raises(
        UserError, match=r"^compiler.fullgraph: .*graph_break.*\n.*allowed: compiler.fullgraph=false, .*"
    ):
        model(torch.ones(2, 3))


@pytest.mark.usefixtures("traced")
def test_a_compiled_step_gives_the_loss_of_model_and_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    done = compile_learner(model, criterion, CPU, "step", Compiler())
    inputs, targets = torch.randn(5, 3), torch.randint(0, 2, (5,))
    assert done.objective is not None
    assert torch.allclose(done.objective(inputs, targets), criterion(model(inputs), targets))
    assert model._compiled_call_impl is None, "evaluations run the model as it is"


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.RMSprop, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"foreach": True})],
)
def test_a_compiled_optimizer_follows_the_learning_rate_and_is_compiled_once(
    kind: Any, options: dict[str, Any]
) -> None:
    def trained(compiled: bool) -> tuple[Tensor, Any, list[int]]:
        weight = torch.linspace(-1, 1, 6).requires_grad_()
        optimizer = kind([weight], lr=0.1, **options)
        if compiled:
            assert compile_optimizer(optimizer, Compiler()) == "and the optimizer's step"
        meter = Compilation("model", Compiler())
        graphs = []
        for step in range(4):
            weight.grad = torch.cos(weight.detach())
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.1 / (step + 1), "the rate stays a number"
            graphs.append(meter.spent()[1])
        return weight, optimizer.state_dict(), graphs

    plain, state, _ = trained(False)
    compiled, compiled_state, graphs = trained(True)
    # The compiler corrects AdamW's moments in float32, torch in float64.
    assert torch.allclose(plain, compiled, atol=1e-5 if kind is torch.optim.AdamW else 1e-6)
    assert 1 <= graphs[1] == graphs[3] <= 2, "once more at most, when there is momentum"
    settings, compiled_settings = state["param_groups"][0], compiled_state["param_groups"][0]
    assert compiled_settings == settings | {"foreach": False if options.get("foreach") else settings["foreach"]}
    assert compiled_state["state"].keys() == state["state"].keys()


def test_an_optimizer_that_gains_nothing_is_left_alone() -> None:
    weight = torch.ones(3, requires_grad=True)
    fused = torch.optim.AdamW([weight], fused=True)
    assert compile_optimizer(fused, Compiler()) == "the optimizer's step is one kernel already"
    rate = torch.optim.SGD([weight], lr=torch.tensor(0.1), foreach=False)
    assert "its rate is a tensor" in compile_optimizer(rate, Compiler())

    class Own(torch.optim.SGD):
        pass

    assert compile_optimizer(Own([weight]), Compiler()) == "the step of Own as it is"
    assert all("step" not in vars(optimizer) for optimizer in (fused, rate))


def test_modes_of_cuda_graphs_elsewhere_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toggles, "missing_compiler", lambda device: "")
    for mode, same in (("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")):
        options = Compiler(mode=mode)  # type: ignore[arg-type]
        (said,) = compile_learner(nn.Linear(2, 2), nn.MSELoss(), CPU, "step", options).warnings
        assert said.startswith(f"compiler.mode={mode}: there are no CUDA graphs on cpu")
        assert said.endswith(f"the mode {same} does")
    options = Compiler(mode="max-autotune-no-cudagraphs")
    assert not compile_learner(nn.Linear(2, 2), nn.MSELoss(), CPU, "step", options).warnings


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"^compile: true needs a C\+\+ compiler on the CPU\n.*compile=false"):
        compile_learner(nn.Linear(2, 2), nn.MSELoss(), CPU, "model", Compiler())


@pytest.mark.usefixtures("traced")
def test_the_compiler_times_no_kernels_where_algorithms_are_deterministic_and_rounds_where_autocast_does() -> None:
    from torch._inductor import config

    for deterministic, mixed in ((True, False), (False, True), (False, False)):
        compile_learner(
            nn.Linear(2, 2), nn.MSELoss(), CPU, "model", Compiler(), deterministic=deterministic, mixed=mixed
        )
        assert config.deterministic is deterministic  # type: ignore[attr-defined]
        assert config.emulate_precision_casts is mixed


def test_the_row_of_the_header_says_what_is_compiled() -> None:
    done = Compilation("step", Compiler(dynamic=None))
    done.optimizer = "and the optimizer's step"
    label, value, reason = done.row()
    assert (label, value) == ("compiled", "forward and loss together, and the optimizer's step")
    assert reason == "compile=step, mode default, for other batch sizes when they come"
