"""Old names of config keys and components: an old key is refused with its new name; stored configs are migrated."""

from __future__ import annotations

from typing import Any

from runner.config.errors import Problem
from runner.config.keys import at, walk, within

KEYS = {
    "clip": "grad_clip",
    "data.residency": "data.placement",
    "optimizer.scale_lr": "optimizer.lr_base_batch_size",
    "averaging.lr": "averaging.lr_factor",
}
MODULES = {
    "runner.data.augment": "runner.data.transforms.augment",
    "runner.data.colour": "runner.data.transforms.color_jitter",
    "runner.data.crops": "runner.data.transforms.crops",
    "runner.data.mixing": "runner.data.transforms.mixing",
    "runner.data.policies": "runner.data.transforms.auto_augment",
    "runner.data.resized_crop": "runner.data.transforms.resized_crop",
    "runner.data.digits": "runner.data.sources.digits",
    "runner.data.folders": "runner.data.sources.folders",
    "runner.data.synthetic": "runner.data.sources.synthetic",
    "runner.data.torchvision_sets": "runner.data.sources.torchvision_sets",
}


def new_key(key: str) -> str | None:
    """The present name of a dotted key that was renamed, or that lies in a section that was; None for any other key."""
    return next((new + key.removeprefix(old) for old, new in KEYS.items() if within(key, [old])), None)


def new_target(path: str) -> str:
    """The present path of a component."""
    module, _, name = path.rpartition(".")
    return f"{MODULES[module]}.{name}" if module in MODULES else path


def renamed_problem(key: str) -> Problem | None:
    """The problem of a key that was renamed; None if it was not."""
    new = new_key(key)
    return None if new is None else Problem(key, f"was renamed to {new}", new)


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Give the keys and components of a stored config their present names, in place; an entry keeps its position."""
    for old, new in KEYS.items():
        parents, _, last = old.rpartition(".")
        section, name = at(values, parents) if parents else values, new.rpartition(".")[2]
        if isinstance(section, dict) and last in section and name not in section:
            items = [(name if key == last else key, value) for key, value in section.items()]
            section.clear()
            section.update(items)
    for _, node in walk(values):
        if isinstance(node, dict) and isinstance(node.get("_target_"), str):
            node["_target_"] = new_target(node["_target_"])
    return values
