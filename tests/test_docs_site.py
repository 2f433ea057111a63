"""The documentation as a site: what is generated from the code, the tutorial as a whole, and the tables of other programs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import docs_pages
import pytest
import runs_that_ended_early
import yaml
from docs_pages import DOCS, PAGES, REPOSITORY, TUTORIAL

from runner.base.errors import UserError
from runner.config import keys
from runner.config.changes import CHANGES
from runner.config.schema import VERBS
from runner.config.sources import Sources
from runner.verbs.options import _commented

# Options of packages that the pages of the documentation show.
OWN = {"net"}
OTHERS = sorted((DOCS / "coming_from").glob("*.md"))


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    return docs_pages.hook()


def test_the_page_of_all_keys_has_every_key_and_option(hook: ModuleType) -> None:
    page = hook.all_keys()
    known = {key for schema in VERBS.values() for key in keys.all_keys(schema) if keys.find(schema, key) is not None}
    sections = {key.rpartition(".")[0] for key in known}
    groups = set(Sources().groups())
    of_options = {place.key for place in _commented(Sources()) if place.comment}
    leaves = {key for key in known - sections - groups if key in of_options}
    assert sorted(key for key in leaves if f"</a>`{key}` |" not in page) == []
    options = [f"{group}={option.name}" for group in groups for option in Sources().options(group)]
    assert [name for name in options if f"### `{name}`\n" not in page] == []
    assert [name for name in options if f"`{name}`" not in hook.all_options()] == []


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
def test_what_is_generated_in_a_page_is_current(hook: ModuleType, document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert hook.filled(text) == text, "run `make docs-generate`"


def test_marks_are_filled_again_and_pages_of_the_root_have_their_links(hook: ModuleType) -> None:
    marks = [mark for page in PAGES for mark in hook._MARK.findall(page.read_text(encoding="utf-8"))]
    assert {name for _, name, _ in marks} == set(hook.GENERATED)
    page = "Before.\n\n<!-- generated: keys seed -->\n\nBetween.\n\n<!-- generated: all_verbs -->\n\nAfter.\n"
    filled = hook.filled(page)
    ended = page.replace("-->", "--> <!-- end of generated -->")
    assert re.sub(r"^\|.*\n", "", filled, flags=re.M).split() == ended.split()
    assert "| `seed` | `0` |" in filled
    assert "[`eval`](../reference/verbs/eval.md)" in filled
    assert hook.filled(filled.replace("| `0` |", "| `1` |")) == filled
    assert "(migrating.md)" in hook.root_page("project/changelog.md")
    assert "(../explanation/architecture.md)" in hook.root_page("project/contributing.md")


def test_a_mark_for_a_table_of_keys_gives_their_defaults_and_meanings(hook: ModuleType) -> None:
    table = hook.filled("<!-- generated: keys grad_clip.* seed -->").splitlines()
    assert [line.split(" | ")[0] for line in table[4:-2]] == [
        f"| `{key}`" for key in ("grad_clip.norm", "grad_clip.value", "grad_clip.agc", "seed")
    ]
    assert "| `optimizer.lr` | `0.02` | learning rate of Muon; " in hook.component("optimizer=muon", "optimizer.lr")
    assert "| `split` | `test` | split to evaluate: train, val or test |" in hook.keys_of_verb("eval")
    assert "`data.batch_size` | `64`" in hook.keys_of_runs("data.*")


@pytest.mark.parametrize(
    ("mark", "error", "reason"),
    [
        ("keys seed grad_clip.nrom", ValueError, "no key matches 'grad_clip.nrom'"),
        ("keys optimizer.betas", ValueError, "no key matches 'optimizer.betas'"),
        ("keys_of_verb eval splits", ValueError, "no key matches 'splits'"),
        ("component loss=focal model.*", ValueError, r"no key matches 'model\.\*'"),
        ("component loss=focla", UserError, "focla"),
        ("keys_of_verb evla", AssertionError, "no verb 'evla'"),
    ],
)
def test_a_mark_for_what_does_not_exist_fails(hook: ModuleType, mark: str, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        hook.filled(f"<!-- generated: {mark} -->")


def test_every_page_is_in_the_navigation() -> None:
    # The file has no tags, so that the plain loader reads it.
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = [page for _, page in keys.walk(navigation) if isinstance(page, str)]
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set()


def test_every_message_that_the_troubleshooting_page_names_is_one_of_the_program() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "src").rglob("*.py"))
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 20
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.stem)
def test_every_key_beside_one_of_another_program_exists(document: Path) -> None:
    """The last column of the tables: keys, options and verbs; the columns before it are those of the other program."""
    sources = Sources()
    known = set(CHANGES) | set(sources.groups()) | {place.key for place in _commented(sources)} | {"hydra.run.dir"}
    options = {f"{group}={option.name}" for group in sources.groups() for option in sources.options(group)}
    wrong = []
    for line in document.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            continue
        for word in re.findall(r"`([^`]*)`", line.rpartition(" | ")[2]):
            for part in re.findall(r"(?<!\S)[a-z][\w.]*(?:=(?:\[[^]]*\]|\{[^}]*\}|\S+))?(?!\S)", word):
                key, _, value = part.partition("=")
                if not value and "." not in key and not keys.find(VERBS["train"], key):
                    continue  # a word of a command, a file, a metric
                item = re.sub(r"\.\d+\.", ".", key)  # of a list
                of_group = key in sources.groups() and value and value not in OWN
                if f"{key}={value}" not in options if of_group else not {key, item} & known and _no_key(key):
                    wrong.append(part)
    assert wrong == []


def _no_key(key: str) -> bool:
    """Whether a dotted word is neither a key of some verb nor a file or a name of Python."""
    if key.endswith((".yaml", ".jsonl", ".safetensors", ".pth", ".py")) or key.split(".")[0] in ("runner", "nn"):
        return False
    return all(keys.find(schema, key) is None for schema in VERBS.values())


@contextlib.contextmanager
def interrupted_once(logged: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C as soon as `logged`."""

    def press() -> None:
        for _ in range(6000):
            if logged():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.extended
def test_the_tutorial_runs_from_the_first_command_to_the_last(run: Any, workdir: Path) -> None:
    script = re.search(r"`my_photos\.py`:\n\n```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)
    assert script is not None
    (workdir / "my_photos.py").write_text(script[1])
    for name in ("digits", "sweep", "photos"):
        runs_that_ended_early.lay_down(workdir / "outputs" / name)
    done = []
    for command, output in docs_pages.commands(TUTORIAL):
        verb, *rest = command.removeprefix("python -m runner ").split()
        if command.startswith("pip "):
            continue
        if command == "python my_photos.py":
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(workdir / "my_photos.py"))
        elif not command.startswith("python "):
            assert subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout, command
        else:
            # The first run has no override of its own, and the test of the README trains it in full.
            short = ["threads=1"] * (verb in VERBS) + ["log.curves=false"] * (verb == "train")
            short += ["epochs=2"] * (command == "python -m runner train")
            status, ctrl_c = (2 if output.startswith("error:") else 0), "^C" in output
            if ctrl_c:
                lines = lambda: any(path.stat().st_size for path in workdir.glob("outputs/long/*/metrics.jsonl"))  # noqa: E731
                with interrupted_once(lines):
                    result = run(verb, *rest, *short)
                assert "stopped by SIGINT; resume with ckpt_path=outputs/long/" in result.out + result.err
                status = 75
            else:
                result = run(verb, *rest, *short)
            assert result.status == status, f"{command}: {result.err}"
            assert status != 2 or result.err.strip() == output
        done.append(command)
    assert len([command for command in done if command.startswith("python -m runner")]) >= 11
    assert "photos/train/zero" in (workdir / "zero.csv").read_text()
    assert len(list(workdir.glob("outputs/sweep/sweeps/*/*/summary.json"))) == 2


def test_llms_txt_lists_every_page_of_the_index(hook: ModuleType) -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    text = hook.llms_txt(index, "Trains models.")
    assert text.startswith("# runner\n\n> Trains models.\n\n")
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\.md\) \| (.+) \|$", index, re.MULTILINE)
    assert len(rows) > 40
    for name, page, content in rows:
        line = re.search(rf"^- \[{re.escape(name)}\]\({page}/\): (.+)$", text, re.MULTILINE)
        assert line, page
        assert line[1].partition("]")[0] == content.partition("]")[0]
    assert "|" not in re.sub(r"`[^`]*`", "", text)


def test_agents_md_names_commands_and_files_that_exist() -> None:
    text = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    named = {word for words in re.findall(r"\bmake ([a-z][a-z -]*)", text) for word in words.split()}
    assert named <= {*targets, "SHORT"}
    files = re.findall(r"`([\w/.]+(?:\.py|/))`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(files) > 15
    assert [name for name in files if not (REPOSITORY / name).exists()] == []
    order = re.findall(r"`src/runner/([\w/]+\.py)`", text)
    page = (DOCS / "explanation/architecture.md").read_text(encoding="utf-8")
    assert order[:8] == re.findall(r"^\d\. `([\w/]+\.py)`:", page, re.MULTILINE)
