"""Compilation by `torch.compile`, of the model or of the step: how long it takes, and what it could not compile.

What torch says about compiling is private (`torch._dynamo.callback`, `.utils.counters`, `.utils.get_compilation_metrics`,
`.exc`, `torch._inductor.config`); tests/runtime/test_compilation.py fails if it changes.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.config.errors import UserError
from runner.runtime.device import missing_compiler

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

_MOST_REPORTED = 5  # recompilations and graph breaks that are reported one by one


@dataclass(frozen=True)
class Options:
    """Arguments of `torch.compile`.

    Attributes:
        mode: what it optimises for.
        fullgraph: stop at the first operation that cannot be compiled, instead of running it in Python.
        dynamic: compile once for all batch sizes; None does so when a second one comes; False compiles for each, so
            that which kernel computes a batch depends on its size alone and a resumed run repeats every bit.
    """

    mode: Mode = "default"
    fullgraph: bool = False
    dynamic: bool | None = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `torch.compile`."""
        return {"mode": self.mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic}

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether kernels are replayed as CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")


class _Clock:
    """The time that this process has spent compiling; one for the process, so that no meter is kept alive."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def end(self, *_: Any) -> None:
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None


_CLOCK = _Clock()


class CompileMeter:
    """Counts what compiling costs, from when it is made: every compilation of the process, forward and backward."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import counters

        if _CLOCK.start not in callback_handler.start_callbacks:  # torch.compiler.reset() removes them
            callback_handler.register_start_callback(_CLOCK.start)
            callback_handler.register_end_callback(_CLOCK.end)
        self._counters = counters
        self._breaks_before = dict(counters["graph_break"])
        self._graphs_before = int(counters["stats"]["unique_graphs"])
        self._made, self._seconds_before = time.time(), _CLOCK.seconds

    @property
    def seconds(self) -> float:
        """Time spent compiling."""
        return _CLOCK.seconds - self._seconds_before

    @property
    def graphs(self) -> int:
        """Graphs compiled."""
        return int(self._counters["stats"]["unique_graphs"]) - self._graphs_before

    def graph_breaks(self) -> dict[str, int]:
        """What could not be compiled, each reason with how often it occurred."""
        found: Counter[str] = Counter()
        for reason, count in self._counters["graph_break"].items():
            found[in_one_line(reason)] += count - self._breaks_before.get(reason, 0)
        return dict(+found)

    def recompilations(self) -> list[str]:
        """Why something was compiled again, in order."""
        from torch._dynamo import utils

        frames: list[Any] = getattr(utils, "get_compilation_metrics", list)()
        later = [frame for frame in frames if (getattr(frame, "start_time", None) or 0.0) >= self._made]
        reasons = [getattr(frame, "recompile_reason", None) for frame in later]
        return [in_one_line(reason) for reason in reasons if reason]


def in_one_line(reason: str) -> str:
    """The sentence in what the compiler says about a graph break or a recompilation, of at most 200 characters."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    text = re.sub(r"^\d+/\d+: ", "", lines[0]) if lines else "no reason given"
    for name in ("Explanation: ", "Graph Break Reason: "):
        said = [line.removeprefix(name) for line in lines if line.startswith(name)]
        if said and said[0] not in text:
            text = f"{text}: {said[0]}"
            break
    text = re.sub(r"\s+", " ", text.split("  #")[0]).strip()
    return text if len(text) <= 200 else text[:197] + "..."


@dataclass
class Compilation:
    """What is compiled in a run.

    Attributes:
        what: `model` or `step`.
        options: arguments of `torch.compile`.
        meter: what it costs.
        objective: (images, targets) -> loss, for `step`; None for `model`.
        optimizer: what became of the optimizer's step, a clause.
        warnings: what people should know.
    """

    what: Literal["model", "step"]
    options: Options
    meter: CompileMeter
    objective: Callable[[Tensor, Tensor], Tensor] | None = None
    optimizer: str = ""
    warnings: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, str, str]:
        """Label, value and reason for people."""
        parts = "the model" if self.what == "model" else f"forward and loss together, {self.optimizer}"
        shapes = {
            False: "for each batch size",
            None: "for other batch sizes when they come",
            True: "for all batch sizes",
        }
        return "compiled", parts, f"compile={self.what}, mode {self.options.mode}, {shapes[self.options.dynamic]}"


def compile_learner(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    what: Literal["model", "step"],
    options: Options,
    deterministic: bool = False,
    mixed: bool = False,
) -> Compilation:
    """Compile a model, or model and loss together, in place: the names in its state dict stay as they are.

    Nothing is compiled before it is first called, so this costs little.

    Args:
        model: the model on its device, with all that changes its forward already done.
        loss: (logits, targets) -> scalar.
        device: where they compute.
        what: `model`, which serves evaluations too, or `step`, after which evaluations run as they are.
        options: arguments of `torch.compile`.
        deterministic: have the compiler choose no kernel by timing it.
        mixed: forward passes run under autocast.

    Raises:
        UserError: without the compiler that the device needs.
    """
    if missing := missing_compiler(device):
        raise UserError("compile", f"{what if what == 'step' else 'true'} {missing}", "install it, or compile=false")
    _configure(deterministic, mixed)
    compilation = Compilation(what, options, CompileMeter())
    if options.uses_cuda_graphs and device.type != "cuda":
        compilation.warnings.append(
            f"compiler.mode={options.mode}: there are no CUDA graphs on {device.type}, so it does what the mode "
            f"{'default' if options.mode == 'reduce-overhead' else 'max-autotune-no-cudagraphs'} does"
        )
    if what == "model":
        model.compile(**options.arguments())
        model._compiled_call_impl = _with_user_errors(model._compiled_call_impl)
    else:

        def objective(images: Tensor, targets: Tensor) -> Tensor:
            return loss(model(images), targets)

        compilation.objective = _with_user_errors(torch.compile(objective, **options.arguments()))
    return compilation


def _configure(deterministic: bool, mixed: bool) -> None:
    """Set the compiler's own switches, which are the process's."""
    from torch._inductor import config

    wanted = {
        "deterministic": deterministic,
        # Round to 16 bits where autocast does. Left to itself the compiler computes again in 32 bits what it had rounded,
        # does not find the largest value among the results, and gives NaN for the gradient of `amax`.
        "emulate_precision_casts": mixed,
    }
    for name, value in wanted.items():
        if hasattr(config, name):
            setattr(config, name, value)


def forget_compiled() -> None:
    """Drop what earlier runs in this process compiled: torch runs a model uncompiled once there are too many variants."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _with_user_errors(compiled: Any) -> Any:
    """A compiled callable that raises a UserError where compiling fails."""
    from torch._dynamo import exc

    failures = tuple(
        getattr(exc, name)
        for name in ("Unsupported", "BackendCompilerFailed", "FailOnRecompileLimitHit")
        if hasattr(exc, name)
    )

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except failures as error:
            unsupported = isinstance(error, exc.Unsupported)
            allowed = "compiler.fullgraph=false, " if unsupported else ""
            raise UserError(
                "compiler.fullgraph" if unsupported else "compile",
                in_one_line(str(error)),
                f"{allowed}a change in the model, or compile=false",
            ) from error

    return call


def compile_optimizer(optimizer: torch.optim.Optimizer, options: Options) -> str:
    """Compile an optimizer's step in place, where that pays and works.

    The learning rate goes in as a tensor while the step runs, as the compiler would compile again for every number.

    Returns:
        What was done and why, a clause.
    """
    kind = type(optimizer)
    if any(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer's step is one kernel already"
    if not kind.__module__.startswith("torch.optim"):
        return f"the step of {kind.__name__} as it is"
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return "the optimizer's step as it is, as its rate is a tensor"
    for group in optimizer.param_groups:
        # The compiler joins the updates itself, and some classes refuse a rate in a tensor beside foreach.
        if group.get("foreach"):
            group["foreach"] = False
    # Without the hooks around a step, which cannot be compiled.
    bare: Callable[..., Any] = inspect.unwrap(kind.step)
    update = _with_user_errors(
        torch.compile(functools.partial(bare, optimizer), mode=_without_graphs(options), dynamic=False)
    )
    rates = [torch.tensor(float(group["lr"])) for group in optimizer.param_groups]

    def step(closure: None = None) -> None:
        numbers = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate.fill_(group["lr"])
        try:
            with torch.no_grad():
                update()
        finally:
            for group, number in zip(optimizer.param_groups, numbers, strict=True):
                group["lr"] = number

    optimizer.step = step  # type: ignore[assignment, method-assign]
    return "and the optimizer's step"


def _without_graphs(options: Options) -> Mode:
    modes: Mapping[Mode, Mode] = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    return modes.get(options.mode, options.mode)


class CompileReport:
    """Reports what compiling cost when the first compiled step has ended, and whenever something is compiled again."""

    def __init__(self, compilation: Compilation, line: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._meter, self._line, self._warn = compilation.meter, line, warn
        self._seconds = 0.0
        self._recompiled = 0
        self._breaks: dict[str, int] = {}

    def on_step(self, loop: Any) -> None:
        """Report what was compiled since the last step."""
        if self._meter.seconds == self._seconds:
            return
        first = self._seconds == 0.0
        took, self._seconds = self._meter.seconds - self._seconds, self._meter.seconds
        loop.paused_s += took
        step = loop.state.position.global_step
        reasons = self._meter.recompilations()[self._recompiled :]
        if first:
            graphs = self._meter.graphs
            self._line(f"compiled in {took:.1f} s by the end of step {step}: {graphs} graph{'s' * (graphs != 1)}")
        elif self._recompiled < _MOST_REPORTED:
            self._line(f"compiled more in {took:.1f} s by the end of step {step}: {'; '.join(reasons) or 'new code'}")
        self._recompiled += len(reasons)
        for reason, count in self._meter.graph_breaks().items():
            if reason not in self._breaks and len(self._breaks) < _MOST_REPORTED:
                self._warn(f"compile: the graph breaks {count} time{'s' * (count != 1)}: {reason}")
            self._breaks[reason] = count

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Report what was compiled for the evaluation."""
        self.on_step(loop)

    def summary(self) -> dict[str, Any]:
        """`compile_s`, `graph_breaks` and `recompilations`, for the summary of a run."""
        return {
            "compile_s": round(self._meter.seconds, 3),
            "graph_breaks": sum(self._meter.graph_breaks().values()),
            "recompilations": len(self._meter.recompilations()),
        }
