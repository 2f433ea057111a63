"""Chooses the blocks of a model that are checkpointed, and measures how much less autograd keeps for it."""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from runner.base.errors import UserError, first_line
from runner.base.patterns import matching
from runner.instrument.nested import tensors_in
from runner.instrument.no_trace import no_trace
from runner.instrument.saved_tensors import SavedTensors
from runner.runtime import activation
from runner.runtime.memory import readable

Setting = bool | int | float | str | list[str]
Block = tuple[str, nn.Module]
Send = Callable[[int], Any]
Autocast = Callable[[], contextlib.AbstractContextManager[object]]

_LAYERS_OF_A_BLOCK = 3
_KEY = "activation_checkpointing"


@dataclass(frozen=True)
class Recomputed:
    """The blocks that are computed again in backward, and the memory that this saves."""

    names: tuple[str, ...]  # dotted names of the blocks
    kinds: str  # their classes, for people
    found: int  # blocks that could be
    before: int  # bytes that autograd keeps for each sample with nothing checkpointed
    after: int  # the same as it is now
    setting: str  # value of the config, for people
    warnings: list[str] = field(default_factory=list)  # what people should know

    def row(self, batch_size: int) -> tuple[str, str, str]:
        """Label, value and reason for people."""
        if self.names:
            blocks = "block" if self.found == 1 else "blocks"
            what = f"recomputed in {len(self.names)} of {self.found} {blocks}, {self.kinds}"
        else:
            what = "recomputed in marked functions" if self.after < self.before else "nothing recomputed"
        before, after = (readable(size * batch_size) for size in (self.before, self.after))
        return "activations", what, f"{_KEY}={self.setting}: {before} kept of a batch became {after}"


def checkpoint_activations(model: nn.Module, setting: Setting, send: Send, autocast: Autocast) -> Recomputed | None:
    """Recompute blocks of a model in backward, as `activation_checkpointing` says.

    What is saved is measured on two and on three copies of a sample, so that what does not grow with the batch is not
    counted. Weights, buffers, modes and random generators stay as they are.

    Args:
        model: the model, on its device, not yet compiled.
        setting: false; true for every block; N for every N-th; a share of the kept bytes that may remain; or patterns
            of module names.
        send: sends so many copies of a sample through the model; what it returns holds the graph.
        autocast: gives the context that forward passes run in.

    Returns:
        What was done; None for false.

    Raises:
        UserError: if a pattern matches nothing, or what it matches cannot be computed again.
    """
    # A run before this one in the same process may have left it on
    activation.switch(False)
    if setting is False:
        return None
    probe = _Probe(model, send, autocast)
    # Measured while marked functions are off: the figure is that of the plain model.
    before = probe.bytes_of_sample()
    activation.switch(True)
    warnings: list[str] = []
    if isinstance(setting, str | list):
        blocks = named_blocks(model, [setting] if isinstance(setting, str) else setting)
    else:
        blocks = repeated_blocks(model)
    found = len(blocks)
    # A share of the memory asks for a search, a number for every n-th block
    if isinstance(setting, float):
        blocks = _fewest(probe, blocks, setting, before, warnings)
    elif not isinstance(setting, bool | str | list):
        blocks = blocks[::setting]
    for name, module in blocks:
        activation.wrap(module, name)
    # The measurement decides whether it had any effect
    after = probe.bytes_of_sample()
    # A block that cannot be computed again is found here, not in the first step.
    probe.backward()
    shown = str(setting).lower() if isinstance(setting, bool) else str(setting)
    names = tuple(name for name, _ in blocks)
    if after >= before and (blocks or not found):  # otherwise it is a budget that is kept as it is
        reason = f"the {len(blocks)} blocks keep nothing that could be computed again"
        if not blocks:
            advice = "patterns name modules, and runner.runtime.activation.checkpointed marks functions"
            reason = f"{type(model).__name__} has no repeated blocks; {advice}"
        warnings.append(f"{_KEY}={shown} has no effect: {reason}")
    counts = Counter(type(module).__name__ for _, module in blocks)
    kinds = ", ".join(counts if len(counts) == 1 else (f"{count} {kind}" for kind, count in counts.items()))
    return Recomputed(names, kinds, found, before=before, after=after, setting=shown, warnings=warnings)


def repeated_blocks(model: nn.Module) -> list[Block]:
    """The blocks that a model is built of, in order.

    These are modules of three or more layers with weights whose class occurs more than once. One that holds a container
    of several such blocks, a stage or an encoder, is searched; of others the outermost counts. Where there are none,
    the `Sequential`s inside a container are the blocks.
    """
    # Blocks are composite modules whose class occurs several times, such as the layers of a transformer
    kinds = Counter(type(module) for module in model.modules() if _is_composite(module))

    def several(module: nn.Module) -> bool:
        return _is_composite(module) and kinds[type(module)] > 1

    # A container of blocks is not a block itself, even if its class occurs several times
    def holds_blocks(module: nn.Module) -> bool:
        containers = [inner for inner in module.modules() if inner is not module and _is_container(inner)]
        return any(sum(several(child) for child in container.children()) > 1 for container in containers)

    found = _outermost(model, lambda module: several(module) and not holds_blocks(module))
    if found:
        return found
    # Networks without repeated classes, such as plain CNNs, may still be built of stages
    stages = {
        child
        for container in model.modules()
        if _is_container(container)
        for child in container.children()
        if _is_container(child) and _is_called(child) and _layers(child) > 1
    }
    found = _outermost(model, stages.__contains__)
    return found if len(found) > 1 else []


def _is_composite(module: nn.Module) -> bool:
    return not _is_container(module) and _layers(module) >= _LAYERS_OF_A_BLOCK


def _is_container(module: nn.Module) -> bool:
    """True if it only holds others: `Sequential`, `ModuleList` and the like."""
    return not _is_called(module) or type(module).forward is nn.Sequential.forward


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _layers(module: nn.Module) -> int:
    """The number of modules with direct parameters."""
    return sum(bool(inner._parameters) for inner in module.modules())


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[Block]:
    """Modules below `model` that are wanted, and in none that is; each once."""
    found: list[Block] = []
    for name, module in model.named_modules():
        if name and wanted(module) and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def named_blocks(
    model: nn.Module, patterns: Sequence[str], key: str = _KEY, prose: str = "true, a number"
) -> list[Block]:
    """The outermost modules whose dotted names match a pattern, such as `layer?.*` or `encoder.layers.*`.

    A `ModuleList` is never called itself, so it means the modules in it. `key` and `prose` are for the error, see `matching`.

    Raises:
        UserError: if a pattern matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        for name in matching(key, pattern, names, "module", prose=prose):
            chosen.update(_called(model.get_submodule(name)))
    return _outermost(model, chosen.__contains__)


def _called(module: nn.Module) -> list[nn.Module]:
    return [module] if _is_called(module) else [inner for child in module.children() for inner in _called(child)]


def _fewest(probe: _Probe, blocks: list[Block], share: float, before: int, warnings: list[str]) -> list[Block]:
    """As few blocks as leave no more than a share of the bytes, those that keep most first; in order."""
    kept = probe.bytes_by_module()
    size = {name: sum(kept[inner] for inner in kept if f"{inner}.".startswith(f"{name}.")) for name, _ in blocks}
    # The largest blocks first: few blocks computed twice cost less time than many
    largest = sorted(blocks, key=lambda block: -size[block[0]])

    # The bytes are measured rather than added up, because blocks share tensors with their surroundings
    def remains(count: int) -> float:
        for name, module in largest[:count]:
            activation.wrap(module, name)
        for _, module in largest[count:]:
            activation.unwrap(module)
        return probe.bytes_of_sample() / max(1, before)

    # More blocks never keep more bytes, so a binary search is enough
    count = bisect.bisect_left(range(len(blocks)), True, key=lambda count: remains(count) <= share)
    if blocks and count == len(blocks) and (least := remains(count)) > share:
        warnings.append(f"{_KEY}={share} cannot be reached: all {count} blocks together leave {least:.2f} of the bytes")
    # The caller wraps the chosen ones; the search leaves the model as it was
    for _, module in blocks:
        activation.unwrap(module)
    return [block for block in blocks if block in largest[:count]]


class _Probe:
    """Trains on copies of one sample, as far as is needed to measure what autograd keeps, and leaves no trace."""

    def __init__(self, model: nn.Module, send: Send, autocast: Autocast) -> None:
        self._model, self._send, self._autocast = model, send, autocast

    @contextlib.contextmanager
    def _outputs(self, samples: int) -> Iterator[Any]:
        """The outputs of the model for copies of the sample in training mode."""
        with no_trace(self._model), torch.enable_grad():
            self._model.train()
            with self._autocast():
                outputs = self._send(samples)
            yield outputs

    def _saved(self, samples: int) -> SavedTensors:
        # The outputs hold the graph, so they must live until everything is counted.
        with SavedTensors(self._model) as saved, self._outputs(samples):
            saved.activations  # noqa: B018  # counts up to here
        return saved

    def bytes_of_sample(self) -> int:
        """Bytes that autograd keeps for one more sample."""
        return max(0, self._saved(3).activations - self._saved(2).activations)

    def bytes_by_module(self) -> dict[str, int]:
        """Bytes kept of three samples, by the module that was running."""
        return self._saved(3).by_module

    def backward(self) -> None:
        """Run backward once; a UserError if what is checkpointed cannot be computed again."""
        # Only what is trained has to be reached: backward computes the checkpointed blocks again
        inputs: list[Tensor] = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        with no_trace(self._model), self._outputs(2) as outputs:
            total = sum(tensor.float().sum() for tensor in tensors_in(outputs) if tensor.requires_grad)
            if not isinstance(total, Tensor):
                return
            try:
                torch.autograd.grad(total, inputs, allow_unused=True)
            except (CheckpointError, RuntimeError) as error:
                raise UserError(
                    _KEY,
                    f"what is checkpointed cannot be computed again: {first_line(error)}",
                    "patterns that match only functions of their input, or false",
                ) from error
