"""Secrets are masked wherever a run stores or shows what it was told, and nothing else is."""

from __future__ import annotations

import dataclasses
import importlib
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from runner.base.errors import Problem
from runner.base.secrets import is_masked, is_secret, mask_text, mask_values, mask_word, unmasked
from runner.config import stored
from runner.config.keys import flatten

SECRETS = (
    "password", "passwd", "pwd", "passphrase", "secret", "client_secret", "hf_token", "access_token", "api_key", "apiKey",
    "api-key", "APIKEY", "access_key", "private_key", "AWS_SECRET_ACCESS_KEY", "authorization", "credentials", "password2",
)  # fmt: skip
INNOCENT = (
    "key", "token", "session", "signature", "sig", "auth", "pass", "cookie", "keys", "monkey", "image_key", "sort_key",
    "key_dim", "tokens", "tokenizer", "class_token", "num_tokens", "author", "password_file", "lr", "session_length",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)
    assert mask_word(f"++logger.x.{name}=abc def,ghi") == f"++logger.x.{name}=***"
    assert mask_word(f"logger.x.{name}.inner=abc") == f"logger.x.{name}.inner=***"
    assert "abc" not in mask_word(f"logger.x={{url: u, inner: {{{name}: abc}}}}")
    assert mask_values({"x": [{name: "abc", "other": "abc"}]}) == {"x": [{name: "***", "other": "abc"}]}


@pytest.mark.parametrize("name", INNOCENT)
def test_names_that_only_look_like_secrets_are_left_alone(name: str) -> None:
    assert not is_secret(name)
    for word in (f"model.{name}=abc", f"model={{{name}: abc}}"):
        assert mask_word(word) == word
    assert mask_values({name: "abc"}) == {name: "abc"}


def test_no_key_of_the_program_is_taken_for_a_secret(compose: Any) -> None:
    for words in ((), ("logger=all", "data=image_folder", "transform=strong", "model=vit_tiny")):
        keys = flatten(compose(*words).values)
        assert not [key for key in keys if any(map(is_secret, key.split(".")))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a.url=postgres://user:p@ss@host/db", "a.url=postgres://user:***@host/db"),
        ("git@github.com:x/y.git", "git@github.com:x/y.git"),
        ("http://host:8080/path", "http://host:8080/path"),
        ("--api-key=abc", "--api-key=***"),
        ("optimizer.lr=0.1,0.01", "optimizer.lr=0.1,0.01"),
    ],
)
def test_passwords_in_urls_and_flags_are_masked(before: str, after: str) -> None:
    assert mask_word(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "logger.x.api_key: is not an argument",
        "the password: it is missing",
        "sorted(names, key=len)",
        "epoch 1/30  step 12/600  loss 0.412",
    ],
)
def test_messages_are_not_rewritten(text: str) -> None:
    assert mask_text(text) == text
    assert mask_text(f"{text} at https://me:abc@host/a") == f"{text} at https://me:***@host/a"


def test_only_texts_and_whole_numbers_are_masked_so_that_components_keep_what_they_are() -> None:
    inner = {"_target_": "a.B", "user": "me", "pin": 12, "on": True, "rate": 0.5, "none": None}
    values = {"credentials": inner, "hf_token": ""}
    masked = mask_values(values)
    assert masked["credentials"] == inner | {"user": "***", "pin": "***"}
    assert masked["hf_token"] == ""
    assert unmasked(masked, values) == values
    assert unmasked(masked, {}) == masked
    assert is_masked("s3://a:***@b")
    assert not is_masked("photos/***/a.png")


def test_a_stored_config_takes_its_secrets_from_the_call(compose: Any) -> None:
    composed = {"logger": {"x": {"api_key": "abc", "url": "https://a:abc@b"}}, "seed": 1}
    kept = yaml.safe_load(stored.dump(composed))
    assert "abc" not in str(kept)
    line = dataclasses.replace(compose(), values=composed, overrides=[])
    assert stored.overlay(kept, line) == composed
    assert stored.differences(kept, composed) == []


def test_an_override_that_cannot_be_read_does_not_show_secrets() -> None:
    word = """callbacks.x.headers={n:1,X-Api-Key:a=b; id=hunter2,Authorization:"Bearer hun\\"ter hunter2"""
    told = "\n".join(Problem(word, "has a value that cannot be read").lines())
    assert "hunter2" not in told
    assert told.startswith("callbacks.x.headers=***")


def test_a_message_about_a_secret_does_not_show_it() -> None:
    problem = Problem("logger.x.api_key", "cannot be 'abc'", "a number", origin="the override logger.x.api_key=abc")
    assert "abc" not in mask_text("\n".join(problem.lines()))
    problem = Problem("logger.x", "is wrong", origin="the override logger.x.credentials={user: me, pin: abc}")
    assert problem.lines()[-1] == "    from: the override logger.x.credentials=***"
    problem = Problem("logger.x", "is wrong", origin="the override logger.x={user: me, password: abc}")
    assert problem.lines()[-1] == "    from: the override logger.x=***"


SENDING = """
BUILT = []

class Sending:
    def __init__(self, api_key: str, url: str = "", auth=None):
        BUILT.append((api_key, url, auth))
    def open(self, directory, resume_step): pass
    def log(self, split, metrics, global_step, epoch): pass
    def flush(self): pass
    def close(self): pass

class Told:
    def __init__(self, api_key: str): pass
    def on_step(self, loop):
        if loop.state.position.global_step == 3: raise RuntimeError(f"cannot reach {BUILT[-1][1]}")

def keyed(key: str, token: str, **others):
    from runner.data.sources.synthetic import synthetic
    assert (key, token) == ("images", "cls")
    return synthetic(**others)
"""
SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "model=mlp", "threads=1",
    "log.progress=false", "log.curves=false", "log.every_steps=1", "logger=none", "evaluate.test=false",
)  # fmt: skip
TOLD = (
    "+logger.x._target_=sending.Sending", "+logger.x.api_key=hunter2", "+logger.x.url='https://me:hunter2@host/a'",
    "+logger.x.auth={user: me, password: hunter2}", "+callbacks.y._target_=sending.Told", "+callbacks.y.api_key=hunter2",
)  # fmt: skip


@pytest.fixture
def sending(own_module: Any) -> ModuleType:
    own_module("sending", SENDING)
    return importlib.import_module("sending")


def _leaks(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_no_file_of_a_run_or_a_sweep_holds_a_secret_and_a_resume_asks_for_it(
    run: Any, accepted: Any, rejected: Any, sending: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "runner", "train", *TOLD])
    first = accepted("train", *SMALL, *TOLD, "max_steps=2", "hydra.run.dir=run")
    assert sending.BUILT == [("hunter2", "https://me:hunter2@host/a", {"user": "me", "password": "hunter2"})]
    assert _leaks(workdir / "run") == []
    assert "hunter2" not in first.out + first.err

    asked = rejected("train", "ckpt_path=run", "max_steps=4")
    assert "callbacks.y.api_key: is a secret" in asked.err

    failed = run("train", "ckpt_path=run", "max_steps=4", "hydra.run.dir=run", *(word.lstrip("+") for word in TOLD))
    assert failed.status == 1
    assert sending.BUILT[-1] == sending.BUILT[0]
    assert "cannot reach https://me:***@host/a" in failed.summary["error"]
    assert "hunter2" not in failed.out + failed.err
    assert _leaks(workdir / "run") == []

    accepted("train", *SMALL, *TOLD, "max_steps=2", "--multirun", "seed=0,1", "hydra.sweep.dir=sweep")
    assert _leaks(workdir / "sweep") == []


@pytest.mark.extended
def test_a_checkpoint_keeps_the_arguments_of_a_data_set_whatever_their_names(accepted: Any, sending: Any) -> None:
    words = ("data.dataset._target_=sending.keyed", "+data.dataset.key=images", "+data.dataset.token=cls")
    accepted("train", *SMALL, *words, "max_steps=2", "hydra.run.dir=run")
    accepted("eval", "ckpt_path=run")
    accepted("train", "ckpt_path=run", "max_steps=3")


def test_the_same_command_with_a_secret_is_known_again(run: Any, sending: Any) -> None:
    words = (*SMALL, *TOLD, "max_steps=4", "resume=auto")
    first = run("train", *words)
    assert first.status == 1, "the callback fails"
    second = run("train", *words)
    assert second.directory == first.directory


def test_files_of_a_run_are_made_by_the_umask(train: Any) -> None:
    before = os.umask(0o077)
    try:
        directory = train(*SMALL[:-2], "logger=all", "max_steps=2", "log.curves=true").directory
    finally:
        os.umask(before)
    for path in [directory, *directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    directory = train(*SMALL, "max_steps=2").directory
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~before}
