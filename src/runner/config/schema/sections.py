"""The sections of a run's config, and the types that their fields share."""

from __future__ import annotations

import dataclasses
import html
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field

from runner.base.reading import is_url
from runner.base.secrets import mask_values

Count = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
TEST_SHARE = 0.2
"""The share that `data.split.test=null` takes where the data set has no validation split."""
Init = Literal["normal", "xavier", "kaiming", "orthogonal", "trunc_normal", "whiten", "zero_gamma", "prior_bias"]
ADJUSTMENTS = ("whiten", "zero_gamma", "prior_bias")
"""Schemes of `init` that change a part of the weights, and follow one that draws all of them."""


@dataclass(frozen=True)
class HasTarget:
    """Marks a mapping that must name what it builds under `_target_`."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Section:
    """The base of the config: subclasses are frozen dataclasses, take no other keys, and a name such as 007 is text."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def _repr_html_(self) -> str:
        """The form for notebooks: the keys as YAML, secrets masked."""
        section: Any = self
        plain = dataclasses.asdict(section, dict_factory=lambda pairs: {key.rstrip("_"): value for key, value in pairs})
        text = yaml.safe_dump(mask_values(plain), sort_keys=False, default_flow_style=None, width=100)
        return f"<pre style='font-family: monospace'>{html.escape(text)}</pre>"


Node = Annotated[dict[str, Any], HasTarget()]


class OptimizerExtras(Section):
    """Keys of `optimizer` in addition to the arguments of its target."""

    lr_base_batch_size: Count | None = None
    no_decay: Literal["auto"] | list[str] | None = None
    lr_mult: dict[str, Annotated[float, Ge(0)]] | None = None
    layer_decay: Annotated[float, Gt(0), Le(1)] | None = None


class ModelExtras(Section):
    """Keys of `model` in addition to the arguments of its target."""

    head: Literal["linear", "none"] | list[Count] | None = None


class TeacherExtras(Section):
    """Keys of `task.teacher`, an option of `model`, in addition to the arguments of its target."""

    head: None = None


# Keys of a component that the program itself reads, unless the component has an argument of that name.
EXTRAS: dict[str, type] = {"model": ModelExtras, "optimizer": OptimizerExtras, "task.teacher": TeacherExtras}
SEVERAL = ("optimizer", "scheduler")
"""Sections that may have several components, each under a name of its own, instead of one."""


def extras_class(key: str) -> type | None:
    """The class of the keys that a component at a dotted key has in addition to the arguments of its target, if any."""
    section, _, name = key.partition(".")
    return EXTRAS.get(section if section in SEVERAL and "." not in name else key)


def components_of(section: str, node: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The components of one of `SEVERAL` by dotted key: that of the section itself, or those under its names."""
    several = section in SEVERAL and "_target_" not in node and any(isinstance(each, dict) for each in node.values())
    return {f"{section}.{name}": each for name, each in node.items()} if several else {section: node}


class Normalize(Section):
    """Statistics that pixels in [0, 1] are normalised with; null means measured on the training split."""

    mean: list[float] | None = None
    std: list[float] | None = None


class Split(Section):
    """The splits of validation and test samples if the data set does not provide them."""

    val: Share | Literal["test"] = 0.1
    test: Share | None = None
    seed: NonNegative = 0
    stratified: bool = True
    folds: Annotated[int, Ge(2)] | None = None
    fold: NonNegative = 0
    group: str | None = None


class Data(Section):
    """The source of the samples and their way to the device."""

    name: str = "data"
    root: str = "data"
    download: bool = False
    batch_size: Literal["auto"] | Count = 64
    image_size: Annotated[int, Ge(1)] | None = None
    max_pixels: Annotated[int, Ge(1), Le(178_956_970)] = 64_000_000  # Pillow itself refuses images beyond its own limit
    decode: Literal["auto", "pillow", "torchcodec", "device"] = "auto"
    shift: Annotated[float, Ge(0), Le(0.5)] = 0.125
    hflip: Annotated[float, Ge(0), Le(1)] = 0.0
    shuffle: bool | Literal["blocks"] = True
    shuffle_window: Count = 16
    sampler: Literal["balanced"] | None = None
    batch_sampler: Node | None = None
    drop_last: bool = False
    placement: Literal["auto", "device", "ram", "disk"] = "auto"
    cache: Literal["disk"] | None = None
    cache_dir: str | None = None
    num_workers: Literal["auto"] | NonNegative = "auto"
    prefetch: Count = 2
    persistent_workers: bool = True
    pin_memory: bool | Literal["auto"] = "auto"
    non_blocking: bool = True
    timeout_s: Annotated[float, Gt(0)] | None = 600.0
    on_error: Literal["raise", "skip"] = "raise"
    max_skipped: Annotated[float, Ge(0), Le(1)] = 0.1
    identity: Literal["check", "ignore"] = "check"
    images: list[str] | None = None
    collate: Node | None = None
    normalize: Normalize = field(default_factory=Normalize)
    split: Split = field(default_factory=Split)
    dataset: Node

    @property
    def location(self) -> str:
        """The folder of the data as an absolute path, or its URL."""
        root = str(self.dataset.get("root") or self.root)
        return root if is_url(root) else os.path.abspath(Path(root).expanduser())  # noqa: PTH100  without `..`

    @property
    def cache_folder(self) -> str:
        """Where files that spare work are kept: `cache_dir`, or beside the folder of the data, where every run finds them.

        For a URL, a folder in the user's own for caches.
        """
        if self.cache_dir is not None:
            return str(Path(self.cache_dir).expanduser())
        if not is_url(self.location):
            return f"{self.location}.cache"
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "runner")
        return str(caches / re.sub(r"[^\w.-]+", "_", self.location.rstrip("/")))

    @property
    def samples_a_batch(self) -> int:
        """`batch_size` once it is known; `auto` is replaced before a run is built."""
        assert self.batch_size != "auto", "data.batch_size=auto is replaced first"
        return self.batch_size


class Transform(Section):
    """Sample transforms run when a sample is read, batch transforms on the device, in the order listed; mixing comes last."""

    sample_train: list[Node] = field(default_factory=list)
    sample_eval: list[Node] = field(default_factory=list)
    train: list[Node] = field(default_factory=list)
    eval: list[Node] = field(default_factory=list)
    mix: Node | None = None
    close_epochs: NonNegative = 0  # at the end of a run, without sample transforms that take other samples


class Compiler(Section):
    """Settings of `compile`: arguments of torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False
    dynamic: bool | None = False


class Evaluate(Section):
    """When the validation split is evaluated, and how."""

    every_epochs: Count | None = 1
    every_steps: Count | None = None
    batch_size: Count = 512
    test: bool = True


class Checkpoint(Section):
    """When checkpoints are written, which are kept, and what `best` means."""

    every_epochs: Count | None = 1
    every_steps: Count | None = None
    min_seconds: Annotated[float, Ge(0)] = 10.0
    async_: Annotated[bool, Field(alias="async")] = True  # `async` is a keyword of Python's
    keep: Count = 2
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None


class Dist(Section):
    """Settings of the processes that work together on a run."""

    timeout_s: Annotated[float, Gt(0)] = 600.0
    find_unused_parameters: bool = False
