"""The toggles of speed and memory that change a model in place, put together in the order in which they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from runner.config.schema.sections import Compiler
from runner.config.schema.train import Train
from runner.runtime.activation import Recomputed, Send, checkpoint_activations
from runner.runtime.compilation import Compilation, CompileReport, compile_learner, compile_optimizer
from runner.runtime.precision import Precision


@dataclass
class Toggled:
    """The changes made to a model, and warnings about them."""

    recomputed: Recomputed | None = None  # what is computed again in backward; None for nothing
    compilation: Compilation | None = None  # what is compiled; None for nothing
    warnings: list[str] = field(default_factory=list)  # settings that have no effect, or not the wanted one

    def objective_of(self, targets: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor] | None:
        """(images, targets of the data set) -> loss, where forward and loss are compiled together."""
        if self.compilation is None or (compiled := self.compilation.objective) is None:
            return None
        return lambda data: compiled(data[0], targets(data[1]))

    def compile_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Compile the optimizer's step too, if the step is what is compiled."""
        if self.compilation is not None and self.compilation.what == "step":
            self.compilation.optimizer = compile_optimizer(optimizer, self.compilation.options)

    def reports(self, line: Callable[[str], None]) -> list[CompileReport]:
        """The callback that reports what compiling cost, if anything is compiled."""
        if self.compilation is None:
            return []
        self.compilation.report.line = line
        return [self.compilation.report]

    def rows(self) -> list[tuple[str, str, str]]:
        """Labels, values and reasons for people."""
        recomputed = [self.recomputed.row()] if self.recomputed else []
        return recomputed + ([self.compilation.row()] if self.compilation else [])


def toggle(config: Train, model: nn.Module, loss: nn.Module, precision: Precision, send: Send) -> Toggled:
    """Checkpoint activations, and compile the result, as the config says; for `send` see `checkpoint_activations`.

    Raises:
        UserError: if a setting is not supported.
    """
    toggled = Toggled(warnings=list(precision.warnings))
    # Only 2-d convolutions have a kernel for that layout
    has_convolution = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
    if config.channels_last and not has_convolution:
        toggled.warnings.append(
            f"channels_last=true has no effect: {type(model).__name__} has no 2-d convolution, whose layout it is"
        )
    # Before compilation, which would otherwise compile blocks that are wrapped afterwards
    toggled.recomputed = checkpoint_activations(model, config.activation_checkpointing, send, precision.autocast)
    if toggled.recomputed is not None:
        toggled.warnings += toggled.recomputed.warnings
    if config.compile is False:
        # A changed option that nothing reads is probably a forgotten compile=true
        if config.compiler != Compiler():
            toggled.warnings.append("compiler has no effect: nothing is compiled, as compile=false")
        return toggled
    what: Literal["model", "step"] = "step" if config.compile == "step" else "model"
    toggled.compilation = compile_learner(
        model,
        loss,
        precision.device,
        what,
        config.compiler,
        deterministic=bool(config.deterministic),
        mixed=precision.dtype is not None,
    )
    toggled.warnings += toggled.compilation.warnings
    return toggled
