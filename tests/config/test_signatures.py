"""Signatures read from source files are those of the imported classes and functions."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml

from runner.config.keys import members
from runner.config.signatures import read_signature
from runner.config.sources import shipped
from runner.config.targets import _annotations, _is_plain, resolve, targets_in

SHIPPED = {
    target for path in shipped().rglob("*.yaml") for _, target in targets_in(yaml.safe_load(path.read_text()) or {})
}
OTHERS = {f"torch.optim.{name}" for name in ("Adagrad", "NAdam", "LBFGS", "Adafactor")}

UNCLEAR = """
import functools
from abc import ABCMeta
from dataclasses import dataclass
from my_other import Missing as Elsewhere

def decorated(function):
    return lambda *args: function(3)

@decorated
def made_by_a_decorator(width): ...

@functools.lru_cache
class Cached:
    def __init__(self, width): ...

class Made(metaclass=ABCMeta):
    def __init__(self, width): ...

class New:
    def __new__(cls, depth): ...
    def __init__(self, width): ...

class Inherits(Elsewhere): ...

class InheritsFields(Elsewhere, dict): ...

@dataclass
class Fields(Elsewhere):
    width: int = 3

try:
    def twice(width): ...
except ImportError:
    def twice(depth): ...

class Twice:
    def __init__(self, width): ...
Twice = decorated(Twice)

class Patched:
    def __init__(self, width): ...
Patched.__init__ = lambda self, depth: None

assigned = decorated(None)
partial: int = 3
"""


@pytest.mark.parametrize("target", sorted(SHIPPED | OTHERS))
def test_the_source_tells_the_arguments_of_shipped_targets_and_their_types(target: str) -> None:
    read, imported = read_signature(target), resolve(target)
    assert inspect.isclass(read) == inspect.isclass(imported)
    expected, found = inspect.signature(imported).parameters, inspect.signature(read).parameters
    assert [*found] == [*expected]
    assert [(each.kind, each.default is each.empty, each.default is None) for each in found.values()] == [
        (each.kind, each.default is each.empty, each.default is None) for each in expected.values()
    ]
    for name in expected:  # what values are checked against
        types = [members(_annotations(each).get(name)) for each in (imported, read)]
        assert [kind for kind in types[0] if _is_plain(kind)] == [kind for kind in types[1] if _is_plain(kind)], name


def test_what_the_source_does_not_tell_for_certain_is_left_to_the_import(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "my_unclear.py").write_text(UNCLEAR)
    monkeypatch.syspath_prepend(workdir)
    names = """made_by_a_decorator Cached Made New Inherits InheritsFields Fields twice Twice Patched assigned partial absent
        Elsewhere"""
    assert [name for name in names.split() if read_signature(f"my_unclear.{name}") is not None] == []
    for path in ("no_such_package.Net", "my_unclear.inner.Net", "math.sqrt", "Net", ".", "torch.nn.CrossEntropyLoss"):
        assert read_signature(path) is None
