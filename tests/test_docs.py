"""The documentation is in step with the program: commands, keys, defaults, options, messages, files and links."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import runs_that_ended_early
import yaml
from docs_pages import DOCS, FENCE, PAGES, REPOSITORY, TUTORIAL, commands, rendered

import runner
from runner.base import errors
from runner.base.errors import Problem
from runner.cli import main
from runner.config import app, keys, load, overrides
from runner.config.changes import CHANGES
from runner.config.composition import Composition
from runner.config.load import problems_in
from runner.config.schema import VERBS
from runner.config.sources import Sources, shipped
from runner.verbs import _table as table

README = REPOSITORY / "README.md"
DOCUMENTS = [path for path in (README, *PAGES) if path.is_file()]
# A file shown whole: its path in the line before, or in the first line.
FILE = re.compile(
    r"^(?:`([\w./]+)`:\n\n)?```(?:python|yaml)\n(?:# ([\w./]+\.(?:py|yaml))\n)?(.*?)^```$", re.M | re.DOTALL
)
START = ["python", "-m", "runner"]
# What the messages in the docs show instead of the folder that the program was started in.
ELSEWHERE = "/home/you"
QUIET = ("logger=none", "threads=1", "evaluate.test=false", "log.curves=false", "log.progress=false")


class Example(NamedTuple):
    """A command as a document shows it: the words after `python -m runner`, and the output that follows."""

    document: Path
    line: str
    words: tuple[str, ...]
    output: str = ""


def words_of(line: str) -> tuple[str, ...] | None:
    """The words after `python -m runner` in a line of a shell, up to a pipe or the next command."""
    words = shlex.split(line, comments=True)
    for index in range(len(words) - 2):
        if words[index : index + 3] == START:
            rest = words[index + 3 :]
            ends = [place for place, word in enumerate(rest) if word in ("&&", "||", "|", ";", ">")]
            return tuple(rest[: ends[0]] if ends else rest)
    return None


@functools.cache
def examples() -> list[Example]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        shown = [*commands(document)]
        shown += [(line, "") for line in re.findall(r"^# (python -m.*)$", text, re.MULTILINE)]
        prose = FENCE.sub("", text)
        shown += [(line, "") for line in re.findall(r"^ {4}(.*python -m runner.*)$", prose, re.MULTILINE)]
        shown += [(line, "") for line in re.findall(r"`((?:\w+=\S+ )?python -m runner [^`]*)`", prose)]
        for line, output in shown:
            words = words_of(line)
            if words is not None and words[:1] != ("VERB",):
                found.append(Example(document, line, words, output))
    return list(dict.fromkeys(found))


def failing(example: Example) -> bool:
    return example.output.startswith("error:")


@pytest.fixture(scope="module")
def workplaces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for the README and one for the pages, with the files that they show and a run to continue."""
    found = {}
    for name, documents in (("README", [README]), ("docs", PAGES)):
        folder = tmp_path_factory.mktemp(name)
        for document in documents:
            for before, within, body in FILE.findall(document.read_text(encoding="utf-8")):
                path = before or within
                if not path.startswith("my_"):
                    continue
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                assert not file.exists() or file.read_text() == body, f"{document.name} has another {path}"
                file.write_text(body)
        (folder / "my_package").mkdir(exist_ok=True)
        (folder / "my_package" / "__init__.py").touch()
        for kind in ("images", "masks"):
            (folder / "my_masks" / kind).mkdir(parents=True)
        (folder / "my_boxes").mkdir(exist_ok=True)
        (folder / "my_boxes" / "data.yaml").write_text("names: [cup, plate]\n")
        (folder / "untrusted.safetensors").write_text("not a checkpoint\n")
        found[name] = folder
        runs_that_ended_early.lay_down(folder / "outputs" / "digits")
    with inside(found["docs"]):
        assert call("train", "epochs=1", "max_steps=2", *QUIET)[0] == 0
    return found


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Work in a folder, its packages importable, as `python -m runner` started there would."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)
        for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
            del sys.modules[name]


def call(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    return status, out.getvalue(), err.getvalue()


def problems_of(verb: str, words: Sequence[str]) -> list[Problem]:
    """Compose a command (the first job of a sweep) as the verb would, and validate it without running it."""
    schema = VERBS[verb]
    flags = overrides.parse_flags(table.VERBS[verb].expand_shorthand(words))
    sources = load.sources_of(flags)
    known = overrides.check_overrides(flags.overrides, schema, sources, multirun=True)
    command = Composition(schema, flags.config_name or verb, sources)
    with app.application(verb, sources):
        composition = load.compose(command, known)
    return problems_in(composition.values, composition, schema)[1]


def says_something_else(example: Example) -> str:
    """What is wrong with a command in the docs; empty if it works, or fails with the message shown."""
    verb, *rest = example.words
    if failing(example):
        status, _, err = call(*example.words, *(["threads=1"] if verb in VERBS else []))
        here = str(Path.cwd())
        message = err.strip().replace(str(Path.cwd().resolve()), ELSEWHERE).replace(here, ELSEWHERE)
        return "" if (status, message) == (2, example.output) else f"exits with status {status} and prints: {message}"
    if verb in VERBS and not {"--cfg", "--info", "--help"} & set(rest):
        return "; ".join(f"{problem.key}: {problem.problem}" for problem in problems_of(verb, rest))
    status, out, err = call(*example.words)
    return "" if (status, err) == (0, "") and out else f"exits with status {status} and prints: {out}{err}"


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path != TUTORIAL], ids=lambda path: path.stem)
def test_every_command_does_what_the_page_shows(document: Path, workplaces: dict[str, Path]) -> None:
    with inside(workplaces["README" if document == README else "docs"]):
        found = {each.line: says_something_else(each) for each in examples() if each.document == document}
    assert {line: problem for line, problem in found.items() if problem} == {}


def test_commands_and_messages_are_found_in_the_docs() -> None:
    assert len([each for each in examples() if failing(each)]) >= 16
    assert len(examples()) >= 200


def test_the_package_of_ones_own_trains_and_resumes(workplaces: dict[str, Path]) -> None:
    options = ("model=net", "data=bars", "transform=gain", "callbacks=stop_at", "logger=text")
    with inside(workplaces["docs"]):
        status, out, err = call("train", "--config-dir", "my_conf", *options, "epochs=2", *QUIET[1:])
        assert status == 0, err
        directory = Path(out.strip().splitlines()[-1])
        assert "val after step 16" in (directory / "evaluations.txt").read_text()
        status, _, err = call("train", f"ckpt_path={directory}", "epochs=3", "threads=1")
        assert status == 2
        assert "trust=[my_package]" in err
        status, out, err = call("train", f"ckpt_path={directory}", "epochs=3", "threads=1", "trust=[my_package]")
        assert status == 0, err
        assert "at step 16" in out


def test_the_optimizer_of_ones_own_resumes_to_the_bit_and_does_what_it_says(workplaces: dict[str, Path]) -> None:
    def weights(*words: str) -> tuple[str, Path]:
        status, out, err = call("train", *QUIET, *words)
        assert status == 0, err
        directory = Path(out.strip().splitlines()[-1])
        return json.loads((directory / "summary.json").read_text())["weights_sha256"], directory

    own = ("--config-dir", "my_conf", "model=net", "data=bars", "scheduler=constant", "epochs=2")
    with inside(workplaces["docs"]):
        whole, _ = weights(*own, "optimizer=lookahead")
        # Step 8 is the third of the second five.
        _, directory = weights(*own, "optimizer=lookahead", "epochs=1")
        resumed, _ = weights(f"ckpt_path={directory}", "epochs=2", "trust=[my_package]")
        assert resumed == whole
        plain, _ = weights(*own, "optimizer.fused=false", "optimizer.foreach=false")
        always, _ = weights(*own, "optimizer=lookahead", "optimizer.every=1", "optimizer.share=1")
        assert always == plain != whole


class Row(NamedTuple):
    """A row of a table of keys, with the `group=option` of the heading that it stands under."""

    document: Path
    option: tuple[str, str] | None
    key: str
    default: str


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(document: Path) -> Iterator[tuple[tuple[str, str] | None, list[str], list[list[str]]]]:
    """(option of the heading, head, rows) of every table."""
    option: tuple[str, str] | None = None
    lines = FENCE.sub("", rendered(document)).splitlines()
    table: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append(cells(line))
            continue
        if table:
            yield option, table[0], table[2:]
            table = []
        if line.startswith("#"):
            named = re.search(r"`(\w+)=(\w+)`", line)
            option = (named[1], named[2]) if named else None


@functools.cache
def key_rows() -> list[Row]:
    return [
        Row(document, option, row[0].strip("`"), row[1].strip("`"))
        for document in PAGES
        for option, head, rows in tables(document)
        if head[:2] == ["key", "default"]
        for row in rows
    ]


def option_values(group: str, name: str) -> dict[str, Any]:
    """What an option sets, by dotted key, the options that it builds on included."""
    option = Sources().option(group, name)
    assert option is not None, f"{group}={name} is not an option"
    content = yaml.safe_load(option.path.read_text()) or {}
    values: dict[str, Any] = {}
    for base in content.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            values |= option_values(group, base)
    prefix = "" if option.is_global else f"{group.replace('/', '.')}."
    return values | {f"{prefix}{key}": value for key, value in keys.flatten(content).items() if content}


def shared_by_all(group: str) -> set[str]:
    """Keys of the options of a group that `_base` gives."""
    return set(option_values(group, "_base")) if Sources().option(group, "_base") else set()


def top_values(page: str) -> dict[str, Any]:
    """The keys of the verbs with their defaults: of the verb that the page is about, else of `train`, else of any."""
    values: dict[str, Any] = {}
    for name in sorted(VERBS, key=lambda verb: (verb == page, verb == "train")):
        content = yaml.safe_load((shipped() / f"{name}.yaml").read_text())
        content.pop("defaults")
        values |= keys.flatten(content)
    shared = [group for group in Sources().groups() if Sources().option(group, "_base")]
    for group in shared:
        values |= option_values(group, "_base")
    for option in Sources().options("hydra/launcher"):
        values |= option_values("hydra/launcher", option.name)
    return values | option_values("transform", "standard")


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
def test_every_key_in_a_table_exists_and_has_the_default_that_the_table_says(document: Path) -> None:
    top, wrong = top_values(document.stem), []
    for row in [row for row in key_rows() if row.document == document]:
        own = row.option and row.key.startswith(f"{row.option[0]}.")
        values = option_values(*row.option) if row.option and own else top
        if row.key not in values:
            if not any(key.startswith(f"{row.key}.") for key in values):
                wrong.append(f"{row.key} does not exist")
        elif row.default and yaml.safe_load(row.default) != values[row.key]:
            wrong.append(f"{row.key} is {values[row.key]}, not {row.default}")
    assert not wrong


def test_every_argument_of_a_component_is_in_the_table_of_its_option() -> None:
    listed = {(*row.option, row.key) for row in key_rows() if row.option}
    # Those that all options of a group have are listed once, under no option.
    listed_once = {row.key for row in key_rows() if not row.option}
    missing = [
        (group, option.name, key)
        for group in ("model", "optimizer", "scheduler", "loss", "task")
        for option in Sources().options(group)
        for key in option_values(group, option.name)
        if not key.endswith("._target_")
        and (group, option.name, key) not in listed
        and not (key in shared_by_all(group) and key in listed_once)
    ]
    assert not missing


def test_every_key_of_the_schema_is_in_the_docs() -> None:
    text = "\n".join(rendered(page) for page in PAGES)
    every = dict.fromkeys(key for schema in VERBS.values() for key in keys.all_keys(schema))
    missing = [key for key in every if not re.search(rf"`{re.escape(key)}[`=.]|\b{re.escape(key)}=", text)]
    assert not missing


def test_what_may_change_when_resuming_is_what_the_docs_say() -> None:
    said = {
        key: change
        for document in PAGES
        for _, head, rows in tables(document)
        if head == ["key", "when resuming"]
        for names, change in rows
        for key in re.findall(r"`([^`]*)`", names)
    }
    assert said == {key: change.value for key, change in CHANGES.items()}


def test_every_option_of_every_group_is_in_the_docs() -> None:
    text = "\n".join(rendered(page) for page in PAGES)
    sources = Sources()
    names = [f"{group}={option.name}" for group in sources.groups() for option in sources.options(group)]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_what_a_preset_sets_is_what_the_docs_say() -> None:
    checked = 0
    for document in PAGES:
        for _, head, rows in tables(document):
            if head != ["option", "sets"]:
                continue
            for name, words, *_ in rows:
                pairs = [word.split("=") for word in re.findall(r"`([^`]*)`", words)[0].split()]
                said = {key: yaml.safe_load(value) for key, value in pairs}
                assert option_values(*name.strip("`").split("=")) == said
                checked += 1
    assert checked == 7


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", FENCE.sub("", document.read_text(encoding="utf-8")))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_a_check_that_the_docs_name_exists_and_nothing_has_two_replacements() -> None:
    from runner.lab.check.run import CHECKS

    reference = "\n".join(path.read_text() for path in (DOCS / "reference").rglob("*.md"))
    named = re.findall(r"\[check\]\([\w./]*check\.md[^)]*\) `([a-z-]+)`", reference)
    assert {*named} <= {each.name for each in CHECKS}
    rows = (DOCS / "project/migrating.md").read_text().splitlines()
    replaced = [row.split("|")[1] for row in rows if row.startswith(("| `", "| histograms"))]
    assert [each for each in replaced if replaced.count(each) > 1] == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    names = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert not [name for name in names if name != "index.md" and f"({name})" not in index]


def test_what_the_page_calls_stable_is_what_there_is(workplaces: dict[str, Path]) -> None:
    page = DOCS / "project" / "stability.md"
    text, found = page.read_text(encoding="utf-8"), {head[0]: rows for _, head, rows in tables(page)}

    def named(start: str, end: str) -> list[str]:
        """The words in backticks of a part of the page."""
        return re.findall(r"`([^`]*)`", text.partition(start)[2].partition(end)[0])

    known = {name: value for name, value in vars(errors).items() if name.isupper() and name[0] != "_"}
    codes = {value for value in known.values() if isinstance(value, int)}
    assert {int(status) for status, _ in found["status"]} == codes
    assert named("the verbs ", "and the") == sorted(table.VERBS)
    assert named("`from runner import` ", ", with") == sorted(runner.__all__)
    run = next(path.parent for path in workplaces["docs"].glob("outputs/digits/*/checkpoints") if any(path.iterdir()))
    stable = {name.strip("`"): fields for name, fields in found["file"]}
    written = {path.name + "/" * path.is_dir() for path in run.iterdir()}
    assert set(stable) <= written <= {*stable, *named("- Other files", "\n- ")}
    environment = json.loads((run / "environment.json").read_text())
    assert set(re.findall(r"`(\w+)`", stable["environment.json"])) <= set(environment)
    documented = (DOCS / "reference" / "run.md").read_text().partition("### `summary.json`")[2].partition("###")[0]
    assert set(json.loads((run / "summary.json").read_text())) <= set(re.findall(r"`(\w+)`", documented))
