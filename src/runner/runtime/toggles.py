"""The toggles of speed and memory that change a model in place, in the order in which they must be: what is computed again in
backward, and compilation by `torch.compile`, of the model or of the step.

What torch says about compiling is private (`torch._dynamo.utils`, `torch._dynamo.exc`, `torch._inductor.config`);
tests/runtime/test_compilation.py fails if it changes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.schema.sections import Compiler
from runner.config.schema.train import Train
from runner.runtime.activation import Row, Send, checkpoint_activations
from runner.runtime.blocks import repeated_blocks
from runner.runtime.device import missing_compiler
from runner.runtime.precision import Precision

# Modes that replay kernels as CUDA graphs, and what they amount to without.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_SHAPES = {False: "for each batch size", None: "for other batch sizes when they come", True: "for all batch sizes"}


class Compilation:
    """What is compiled of a run, and what compiling costs from then on: every compilation of the process, forward and backward.

    As a callback, it reports the cost when the first compiled step has ended, and keeps the time apart from training.
    """

    def __init__(self, what: Literal["model", "blocks", "step"], options: Compiler) -> None:
        from torch._dynamo import utils

        self.what, self.options = what, options
        self.objective: Callable[[Tensor, Tensor], Tensor] | None = None  # (images, targets) -> loss, of `step`
        self.optimizer = ""  # what became of the optimizer's step, a clause
        self.warnings = list[str]()  # what people should know
        self.line: Callable[[str], object] = str  # gets the report
        self._utils, self._made, self._reported = utils, time.time(), 0.0
        self._before = (0.0, 0, 0)
        self._before = self.spent()

    def row(self) -> tuple[str, str, str]:
        """Label, value and reason for people."""
        step = f"forward and loss together, {self.optimizer}"
        parts = {"model": "the model", "blocks": "each block of the model", "step": step}[self.what]
        reason = f"compile={self.what}, mode {self.options.mode}, {_SHAPES[self.options.dynamic]}"
        return "compiled", parts, reason

    def spent(self) -> tuple[float, int, int]:
        """Seconds of compiling since this was made, graphs compiled, and graph breaks: places that run in Python."""
        (seconds, graphs, breaks), counters = self._before, self._utils.counters
        return (
            float(self._utils.calculate_time_spent()["total_wall_time"] - seconds),
            int(counters["stats"]["unique_graphs"] - graphs),
            sum(counters["graph_break"].values()) - breaks,
        )

    def on_step(self, loop: Any) -> None:
        """Take off what compiling took since the last step, and report the first time."""
        total, before = float(self._utils.calculate_time_spent()["total_wall_time"] - self._before[0]), self._reported
        if total == before:
            return
        # Time spent on compiling is not training, or the throughput would look wrong
        loop.paused_s += total - before
        self._reported = total
        if before:
            return
        _, graphs, breaks = self.spent()
        counts = f"{graphs} graph{'s' * (graphs != 1)}, {breaks} graph break{'s' * (breaks != 1)}"
        more = "; TORCH_LOGS=graph_breaks shows where" if breaks else ""
        self.line(f"compiled in {total:.1f} s by the end of step {loop.state.position.global_step}: {counts}{more}")

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """The same for what was compiled for the evaluation."""
        self.on_step(loop)

    def summary(self) -> dict[str, Any]:
        """`compile_s`, `graph_breaks` and `recompilations`, for the summary of a run."""
        seconds, _, breaks = self.spent()
        frames: list[Any] = self._utils.get_compilation_metrics()
        again = sum(bool(frame.recompile_reason) and (frame.start_time or 0.0) >= self._made for frame in frames)
        return {"compile_s": round(seconds, 3), "graph_breaks": breaks, "recompilations": again}


def compile_learner(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    what: Literal["model", "blocks", "step"],
    options: Compiler,
    *,
    deterministic: bool = False,
    mixed: bool = False,
) -> Compilation:
    """Compile a model, or model and loss together, in place: the names in its state dict stay as they are.

    Nothing is compiled before it is first called, so this costs little.

    Args:
        model: the model on its device, with all that changes its forward already done.
        loss: (logits, targets) -> scalar.
        device: of both.
        what: `model`, which serves evaluations too; `blocks`, which does each of `repeated_blocks`, so that equal ones are
            compiled once; or `step`, after which evaluations run as they are.
        options: arguments of `torch.compile`. With `dynamic=False`, the batch size alone decides which kernel computes a
            batch, so a resumed run repeats every bit.
        deterministic: have the compiler choose no kernel by timing it.
        mixed: forward passes run under autocast.

    Raises:
        UserError: without the compiler that the device needs, or without blocks.
    """
    # Without a compiler of the system, the first step would fail with a page of torch's messages
    if missing := missing_compiler(device):
        raise UserError("compile", f"{'true' if what == 'model' else what} {missing}", "install it, or compile=false")
    from torch._inductor import config

    # The compiler's own switches are the process's. Round to 16 bits where autocast does: left to itself the compiler computes
    # again in 32 bits what it had rounded, does not find the largest value among the results, and gives NaN for the gradient
    # of `amax`.
    config.deterministic, config.emulate_precision_casts = deterministic, mixed
    compilation = Compilation(what, options)
    # The mode still works without CUDA graphs, so it is worth a warning only
    if device.type != "cuda" and (other := _WITHOUT_GRAPHS.get(options.mode)):
        compilation.warnings.append(
            f"compiler.mode={options.mode}: there are no CUDA graphs on {device.type}, so it does what the mode {other} does"
        )
    arguments = dataclasses.asdict(options)
    # Compiled in place: a wrapper would put a prefix before the names in the state dict
    if what != "step":
        parts = [model] if what == "model" else [block for _, block in repeated_blocks(model)]
        if not parts:
            raise UserError("compile", f"is blocks, and {type(model).__name__} repeats no block", "true")
        for part in parts:
            part.compile(**arguments)
            part._compiled_call_impl = _with_user_errors(part._compiled_call_impl)
        # Blocks share their code, of which torch compiles 8 variants and runs further ones uncompiled
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(parts))
    else:

        def objective(images: Tensor, targets: Tensor) -> Tensor:
            return loss(model(images), targets)

        compilation.objective = _with_user_errors(torch.compile(objective, **arguments))
    return compilation


def forget_compiled() -> None:
    """Drop what earlier runs in this process compiled: torch runs a model uncompiled once there are too many variants."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _with_user_errors(compiled: Any) -> Any:
    """A compiled callable that raises a UserError where compiling fails."""
    # Imported here, as it takes a second that runs without compilation need not spend
    from torch._dynamo import exc

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (exc.Unsupported, exc.BackendCompilerFailed, exc.FailOnRecompileLimitHit) as error:
            key, allowed = "compile", "a change in the model, or compile=false"
            if isinstance(error, exc.Unsupported):
                key, allowed = "compiler.fullgraph", f"compiler.fullgraph=false, {allowed}"
            raise UserError(key, textwrap.shorten(str(error), 200), allowed) from error

    return call


def compile_optimizer(optimizer: torch.optim.Optimizer, options: Compiler) -> str:
    """Compile an optimizer's step in place, where that pays and works.

    The learning rate goes in as a tensor while the step runs, as the compiler would compile again for every number.

    Returns:
        What was done and why, a clause.
    """
    # Each of these is faster, or at least correct, as it is
    kind, groups = type(optimizer), optimizer.param_groups
    mode = _WITHOUT_GRAPHS.get(options.mode, options.mode)

    def compiled(function: Callable[..., None]) -> Any:
        return _with_user_errors(torch.compile(function, mode=mode, dynamic=False))

    # One of several parts, which compiles its own
    if hasattr(optimizer, "compile_update") and optimizer.compile_update(compiled):
        return f"and the update of {kind.__name__}"
    if any(group.get("fused") for group in groups):
        return "the optimizer's step is one kernel already"
    if not kind.__module__.startswith("torch.optim"):
        return f"the step of {kind.__name__} as it is"
    if any(isinstance(group["lr"], Tensor) for group in groups):
        return "the optimizer's step as it is, as its rate is a tensor"
    for group in groups:
        # The compiler joins the updates itself, and some classes refuse a rate in a tensor beside foreach.
        if group.get("foreach"):
            group["foreach"] = False
    # Without the hooks around a step, which cannot be compiled.
    bare = functools.partial(inspect.unwrap(kind.step), optimizer)
    update = compiled(bare)
    # A rate that is a number would be compiled into the code, and every new rate compile it again
    rates = [torch.tensor(float(group["lr"])) for group in groups]

    def step(closure: None = None) -> None:
        # Afterwards the groups have numbers again, because schedules and checkpoints expect them
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


@dataclass
class Toggled:
    """The changes made to a model, and warnings about them."""

    recomputed: list[Row]  # what is computed again in backward, if anything is
    warnings: list[str]  # settings that have no effect, or not the wanted one
    compilation: Compilation | None = None  # what is compiled; None for nothing

    def objective_of(self, targets: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor] | None:
        """(images, targets of the data set) -> loss, where forward and loss are compiled together."""
        compiled = self.compilation.objective if self.compilation else None
        return None if compiled is None else lambda data: compiled(data[0], targets(data[1]))

    def compile_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Compile the optimizer's step too, if the step is what is compiled."""
        if self.compilation is not None and self.compilation.what == "step":
            self.compilation.optimizer = compile_optimizer(optimizer, self.compilation.options)

    def reports(self, line: Callable[[str], None]) -> list[Compilation]:
        """The callback that reports what compiling cost, if anything is compiled."""
        if self.compilation is None:
            return []
        self.compilation.line = line
        return [self.compilation]

    def rows(self) -> list[Row]:
        """Labels, values and reasons for people."""
        return self.recomputed + ([self.compilation.row()] if self.compilation else [])


def toggle(config: Train, model: nn.Module, loss: nn.Module, precision: Precision, send: Send) -> Toggled:
    """Checkpoint activations, and compile the result, as the config says; for `send` see `checkpoint_activations`.

    Raises:
        UserError: if a setting is not supported.
    """
    warnings = list(precision.warnings)
    # Only 2-d convolutions have a kernel for that layout
    has_convolution = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
    if config.channels_last and not has_convolution:
        warnings.append(
            f"channels_last=true has no effect: {type(model).__name__} has no 2-d convolution, whose layout it is"
        )
    # Before compilation, which would otherwise compile blocks that are wrapped afterwards
    recomputed = checkpoint_activations(model, config.activation_checkpointing, send, precision.autocast, warnings)
    if config.compile is False:
        # A changed option that nothing reads is probably a forgotten compile=true
        if config.compiler != Compiler():
            warnings.append("compiler has no effect: nothing is compiled, as compile=false")
        return Toggled(recomputed, warnings)
    compilation = compile_learner(
        model,
        loss,
        precision.device,
        config.compile if isinstance(config.compile, str) else "model",
        config.compiler,
        deterministic=bool(config.deterministic),
        mixed=precision.dtype is not None,
    )
    return Toggled(recomputed, warnings + compilation.warnings, compilation)
