"""What the documentation takes from the code: `python scripts/docs_hook.py` writes it into the pages.

The text of the function `NAME` in `GENERATED` goes between the lines `<!-- generated: NAME ARGUMENT... -->` and
`<!-- end of generated -->`; the second line is added where it is missing. As a hook of mkdocs, this file also turns the
changelog, the security policy and the rules for contributors, which are in the root of the repository, into pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from runner.config import keys
from runner.config.changes import declared
from runner.config.schema import VERBS as SCHEMAS
from runner.config.sources import Option, Sources, text_of
from runner.verbs._table import VERBS
from runner.verbs.options import Commented, _read, files_of, option_named

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Files of the repository's root, by the page that each becomes.
ROOT_PAGES = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security_policy.md": "SECURITY.md",
}
_END = "<!-- end of generated -->"
# A mark and, if there is one, what was generated for it.
_MARK = re.compile(
    rf"^(<!-- generated: (\w+)((?: \S+)*) -->)$(?:(?:(?!^<!-- generated: ).)*?^{_END}$)?", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# The keys of each page below docs/, or docs/reference/ if there is no folder.
_KEYS_OF_PAGES = {
    "data": "data",
    "models": "model",
    "transforms": "transform",
    "optimization": "optimizer scheduler loss grad_clip accumulate metrics",
    "reference/verbs/find-lr": "lr",
    "tasks": "task",
    "callbacks": "callbacks",
    "logging": "logger log",
    "checkpoints": "checkpoint resume ckpt_path",
    "averaging": "averaging ema swa",
    "howto/fine-tuning": "init init_from init_mismatch freeze unfreeze_at adapters",
    "scale": "devices strategy dist fsdp dry_run max_restarts dtype sync_batchnorm",
    "toggles": "amp channels_last compile compiler activation_checkpointing cudnn_benchmark tf32 matmul_precision",
    "howto/debug": "on_nonfinite watch detect_anomaly post_mortem limit",
    "explanation/reproducibility": "deterministic",
    "project/security": "trust",
}
_PAGES = {key: page for page, keys in _KEYS_OF_PAGES.items() for key in keys.split()}


def page_of(key: str) -> str:
    """The page of the documentation for a key."""
    page = _PAGES.get(key.partition(".")[0], "run")
    return f"docs/{page}.md" if "/" in page else f"docs/reference/{page}.md"


def page_of_verb(verb: str) -> str:
    """The page of the documentation for the keys of a verb."""
    return f"docs/reference/verbs/{verb}.md"


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link_of(page: str) -> str:
    """A link to a page of the documentation, from a page that is one folder deep."""
    path = Path(page).relative_to("docs")
    return f"[{path.stem}](../{path})"


def anchor_of(name: str) -> str:
    """A target of links, as HTML, because Markdown in a repository has no other."""
    return f'<a id="{name}"></a>'


def _keys_of(path: Path, section: str, option: str) -> Iterator[Commented]:
    """Keys of a file; those inside lists, which cannot be set by name, are skipped."""
    content = yaml.safe_load(text_of(path)) or {}
    for found in _read(path, section, option):
        if keys.at(content, found.key.removeprefix(section)) is not ...:
            yield found


def _config_of(verb: str) -> Path:
    path = Sources().primary(verb)
    assert path is not None, f"no verb '{verb}' has a config"
    return path


def _section_of(option: Option) -> str:
    return "" if option.is_global else f"{option.group.replace('/', '.')}."


def _cells(found: Commented, anchor: str = "", notes: str = "") -> list[str]:
    """Key, default and meaning."""
    value = f"`{found.value}`".replace("|", "\\|") if found.value else ""
    return [anchor + f"`{found.key}`", value, cell(found.comment) + notes]


def _row(found: Commented, verb: str) -> list[str]:
    """Key, default and meaning, with the values that the schema admits and what a resumed run may change."""
    annotation = keys.find(SCHEMAS[verb], found.key)
    kind = keys.describe(annotation) if annotation is not None else "any value"
    page = page_of(found.key) if verb == "train" else page_of_verb(verb)
    notes = [f"values: {cell(kind)}"] if kind != "any value" else []
    if verb == "train":
        notes.append(f"change when resuming: {declared(found.key).value}")
    anchor = anchor_of(found.key if verb == "train" else f"{verb}.{found.key}")
    return _cells(found, anchor, f"<br><small>{'; '.join([*notes, link_of(page)])}</small>")


def all_keys() -> str:
    """Every key of every verb and of every option, with default, meaning and values."""
    sources, head, text = Sources(), ("key", "default", "meaning"), []
    ordered = ["train", *(verb.name for verb in VERBS.values() if verb.takes_config and verb.name != "train")]
    in_train: set[str] = set()
    for verb in ordered:
        found = [each for each in _keys_of(_config_of(verb), "", verb) if each.comment and each.key not in in_train]
        if verb == "train":
            in_train = {each.key for each in found}
        text += [f"## `{verb}`", table(head, (_row(each, verb) for each in found))]
    for group in sources.groups():
        text += [f"## Group `{group}`", f"Described in {link_of(page_of(group))}."]
        common: set[Path] = set()
        for option in sources.options(group):
            section = _section_of(option)
            own, *base = files_of(option)
            for path in set(base) - common:
                common.add(path)
                rows = (_row(each, "train") for each in _keys_of(path, section, group) if each.comment)
                text += [f"Every `{group}` has", table(head, rows)]
            text += [f"### `{group}={option.name}`", option.description]
            found = [each for each in _keys_of(own, section, option.name) if each.comment]
            start = f"{group.replace('/', '.')}-{option.name}"
            of_option = [_cells(each, anchor_of(f"{start}-{each.key}")) for each in found]
            text += [table(head, of_option)] if of_option else []
    return "\n\n".join(text)


def _chosen(places: Iterable[Commented], patterns: Sequence[str]) -> str:
    """Key, default and meaning of the keys that match patterns (all if there are none), each pattern at least one."""
    known = [each for each in places if each.comment and not each.key.endswith("_target_")]
    chosen: dict[str, Commented] = {}
    for pattern in patterns or "*":
        found = {each.key: each for each in known if fnmatchcase(each.key, pattern)}
        if not found:
            raise ValueError(f"a table of keys: no key matches '{pattern}'")
        chosen |= found
    return table(("key", "default", "meaning"), map(_cells, chosen.values()))


def keys_of_runs(*patterns: str) -> str:
    """Keys of a run that do not depend on the options chosen: of `train`, and those that all options of a group have."""
    sources = Sources()
    options = [option for group in sources.groups() for option in sources.options(group)]
    bases = {path: option.group for option in options for path in files_of(option)[1:]}
    shared = (each for path, group in bases.items() for each in _keys_of(path, f"{group}.", group))
    return _chosen([*_keys_of(_config_of("train"), "", "train"), *shared], patterns)


def keys_of_verb(verb: str, *patterns: str) -> str:
    """Keys of the config of a verb."""
    return _chosen(_keys_of(_config_of(verb), "", verb), patterns)


def component(name: str, *patterns: str) -> str:
    """Keys of the file of an option, `group=option`."""
    group, _, of_group = name.partition("=")
    option = option_named("docs", group, of_group, Sources())
    return _chosen(_keys_of(option.path, _section_of(option), of_group), patterns)


def all_options() -> str:
    """Every option of every group, one line each."""
    sources, text = Sources(), []
    for group in sources.groups():
        rows = [
            [f"[`{group}={option.name}`](keys.md#{group}{option.name})", cell(option.description)]
            for option in sources.options(group)
        ]
        text += [f"### `{group}`", table(("option", "what it is"), rows)]
    return "\n\n".join(text)


def all_verbs() -> str:
    """Every verb, one line each, with a link to its page where it has one."""
    pages = {"train": "reference/run", "list": "reference/command_line", "show": "reference/command_line"}
    rows = []
    for verb in VERBS.values():
        page = pages.get(verb.name, f"reference/verbs/{verb.name}")
        page = page if (DOCS / f"{page}.md").is_file() else "reference/command_line"
        rows.append([f"[`{verb.name}`](../{page}.md)", cell(verb.help)])
    return table(("verb", "what it does"), rows)


def other_names() -> str:
    """Names that other programs have, by the key that the messages suggest for them."""
    from runner.config.keys import MEANINGS

    by_key: dict[str, list[str]] = {}
    for name, key in MEANINGS.items():
        by_key.setdefault(key, []).append(f"`{name}`")
    return table(("elsewhere", "here"), ([", ".join(names), f"`{key}`"] for key, names in by_key.items()))


GENERATED: dict[str, Callable[..., str]] = {
    "all_keys": all_keys,
    "all_options": all_options,
    "all_verbs": all_verbs,
    "component": component,
    "keys": keys_of_runs,
    "keys_of_verb": keys_of_verb,
    "other_names": other_names,
}


def root_page(page: str) -> str:
    """The text of a file of the repository's root as the page that it becomes, with the links of that page."""
    by_file = {file: name for name, file in ROOT_PAGES.items()}

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target or target.startswith("#"):
            return match[0]
        target = by_file.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(page))})"

    return _LINK.sub(moved, (ROOT / ROOT_PAGES[page]).read_text(encoding="utf-8"))


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that come from the repository's root."""
    from mkdocs.structure.files import File

    for page in ROOT_PAGES:
        files.append(File.generated(config, page, content=root_page(page)))
    return files


def llms_txt(index: str, description: str) -> str:
    """The home page as llms.txt (llmstxt.org), where programs that read documentation look for its pages."""
    text = re.sub(r"^\| page .*\n\|---.*\n", "", index, flags=re.MULTILINE)
    text = re.sub(r"^\| (\[.+?\]\(.+?\)) \| (.*) \|$", r"- \1: \2", text, flags=re.MULTILINE)
    return re.sub(r"\.md(?=[)#])", "/", text).replace("\n\n", f"\n\n> {description}\n\n", 1)


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt beside the pages."""
    text = llms_txt((DOCS / "index.md").read_text(encoding="utf-8"), config.site_description)
    Path(config.site_dir, "llms.txt").write_text(text, encoding="utf-8")


def filled(markdown: str) -> str:
    """A page with what its marks stand for."""
    return _MARK.sub(lambda mark: f"{mark[1]}\n\n{GENERATED[mark[2]](*mark[3].split())}\n\n{_END}", markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as the code is now, so that the site is current while a page is edited."""
    return filled(markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark the tables whose rows docs/assets/site.css takes apart on a phone: of keys, and of keys of other programs."""
    html = re.sub(r"<table>(?=\s*<thead>\s*<tr>\s*<th>key</th>\s*<th>default</th>)", '<table data-rows="keys">', html)
    return html.replace("<table>", '<table data-rows="pairs">') if page.url.startswith("coming_from/") else html


if __name__ == "__main__":
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        if (now := filled(text)) != text:
            path.write_text(now, encoding="utf-8")
            print(path.relative_to(ROOT))
