"""Help, listings and tab completion: what they say, and that they are quick because they import next to nothing."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest
from extended import some

from runner import __version__
from runner.cli import main
from runner.config.keys import hints
from runner.config.schema import VERBS as SCHEMAS
from runner.config.sources import Sources, shipped
from runner.verbs._table import VERBS

# Calls the program as the console script `runner` does; an import that costs seconds is refused and told.
GUARD = """
import sys

heavy = {"torch", "torchvision", "torchmetrics", "numpy", "scipy", "sklearn", "matplotlib", "PIL", "tensorboard", "rich"}
wanted = []


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            wanted.append(name)
            raise ImportError(name)


sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
sys.argv[0] = "runner"
try:
    import runner.cli

    status = runner.cli.main(sys.argv[1:])
finally:
    foreign = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
    print("refused:", *wanted, file=sys.stderr)
    print("foreign:", *sorted(foreign), file=sys.stderr)
    print("modules:", len(set(sys.modules) - before), file=sys.stderr)
sys.exit(status)
"""
LIGHT = [
    "",
    "--help",
    "list",
    "list model",
    "show",
    "show model=mlp",
    "train --help",
    "eval model=mlp -h",
    "list --help",
]
LIGHT += ["trian", "list modle"]
HYDRA = [
    "train --hydra-help",
    "train --cfg job model=vit_tiny +amp=true",
    "train --info defaults",
    "train sede=1 --cfg job",
]


def guarded(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    command = [sys.executable, "-c", GUARD, *words]
    # The environment is emptied: settings of the test run, as those of coverage, import more than the program does.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    notes = dict(line.split(":", 1) for line in done.stderr.splitlines()[-3:])
    return done, {name: text.split() for name, text in notes.items()}


@pytest.mark.parametrize("words", [*LIGHT, *some(HYDRA, 1, 3)])
def test_help_listings_and_what_hydra_shows_import_nothing_slow(words, workdir):
    done, notes = guarded(*words.split())
    assert notes["refused"] == []
    assert words in HYDRA or notes["foreign"] == ["runner"]
    assert int(notes["modules"][0]) < (500 if words in HYDRA else 150)
    assert done.stdout or done.returncode == 2
    assert list(workdir.iterdir()) == []


COMPLETIONS = [
    ("runner tr", ["train"]),
    ("runner ", sorted(VERBS)),
    ("python -m runner ev", ["eval"]),
    ("runner train model=", [f"model={name}" for name in ("mlp", "small_cnn", "vit_tiny")]),
    ("python -m runner train model=vit", ["model=vit_tiny"]),
    ("runner train model=mlp optimizer.weight_d", ["optimizer.weight_decay="]),
    ("runner eval spl", ["split="]),
    ("runner check --json stri", ["strict="]),
    ("runner train --multirun sweep=s", ["sweep=seeds"]),
    ("runner list ", []),
    ("runner show da", ["data=", "data."]),
    ("python -m runner show model=vit", ["model=vit_tiny"]),
    ("runner show model=mlp optimizer.lr optimizer.weight_d", ["optimizer.weight_decay"]),
    ("runner nonsense ", []),
]


@pytest.mark.parametrize(("line", "expected"), COMPLETIONS, ids=[line for line, _ in COMPLETIONS])
def test_tab_completion_knows_verbs_groups_options_and_keys(line, expected, workdir, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert main(["-sc", "query=bash"]) == 0
    offered = capsys.readouterr().out.split()
    assert set(expected) <= set(offered)
    assert bool(expected) == bool(offered)
    assert all(word.startswith(line.split(" ")[-1]) for word in offered)


@pytest.mark.parametrize("line", ["runner ", "runner train model="])
def test_fish_gets_each_completion_in_a_line(line, workdir, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=fish"]) == 0
    offered = capsys.readouterr().out.splitlines()
    assert len(offered) > 5
    assert all(len(each.split()) == 1 for each in offered)


@pytest.mark.parametrize("line", ["runner tr", "runner train model="])
def test_tab_completion_never_imports_torch(line, workdir):
    done, notes = guarded("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in ("train", "model=airbench")
    assert notes["refused"] == []
    assert int(notes["modules"][0]) < (150 if line == "runner tr" else 450)


def test_tab_completion_is_installed_for_the_command(workdir):
    done, notes = guarded("-sc", "install=bash")
    assert (done.returncode, notes["refused"]) == (0, [])
    assert done.stdout.rstrip().endswith("-F hydra_bash_completion runner")
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_help_lists_every_verb_with_what_it_does(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, verb in VERBS.items():
        [line] = re.findall(rf"^  {name} +(\S.*)$", text, re.MULTILINE)
        assert line == verb.help.rstrip(".")
    assert {"copy", "env", "list", "new", "report", "show", "sweep", "watch", *SCHEMAS} == set(VERBS)


def test_the_table_names_a_function_of_each_verb():
    for name, verb in VERBS.items():
        assert callable(pkgutil.resolve_name(f"{verb.module}:run" if verb.takes_config else verb.module))
        assert verb.takes_config == (name in SCHEMAS)


def test_help_is_shown_without_a_verb_and_for_the_word_help(capsys):
    texts = set()
    for words in ([], ["-h"], ["help"], ["--help"]):
        assert main(words) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_every_flag_and_example_of_the_help_is_understood(capsys, workdir):
    from runner.config.overrides import parse_flags

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  python -m runner (\w[\w-]*)(.*?)(?:  .*)?$", text.partition("examples")[2], re.MULTILINE)
    assert len(examples) >= 5
    for verb, words in examples:
        assert verb in VERBS
        if verb in SCHEMAS:
            parse_flags(words.split())
    [(those, flags)] = re.findall(r"^flags of (.*): (--.*)$", text, re.MULTILINE)
    assert sorted(re.split(", | and ", those)) == sorted(SCHEMAS)
    for flag in re.findall(r"--[\w-]+", flags):
        value = {"--cfg": ["job"], "--config-dir": ["x"], "--config-name": ["x"]}.get(flag, [])
        parse_flags([flag, *value])


@pytest.mark.parametrize("named", ["", "loss model"])
def test_list_shows_the_groups_that_are_named_or_all_and_their_options(named, capsys):
    assert main(["list", *named.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    sources, groups = Sources(), named.split() or Sources().groups()
    assert [line for line in lines if not line.startswith(" ")] == groups
    assert not any(line.strip().startswith("_") for line in lines)
    for group in groups:
        begin = lines.index(group)
        for offset, option in enumerate(sources.options(group), start=1):
            name, description = lines[begin + offset].split(maxsplit=1)
            assert (name, description) == (option.name, option.description)


def test_list_show_and_help_see_the_users_own_folder(capsys, workdir):
    (workdir / "mine" / "model").mkdir(parents=True)
    own = workdir / "mine" / "model" / "users.yaml"
    own.write_text("# My own model.\n_target_: my_package.Net\n")
    assert main(["list", "model", "--config-dir", "mine"]) == 0
    assert re.search(r"^  users +My own model\.$", capsys.readouterr().out, re.MULTILINE)
    assert main(["show", "--config-dir=mine", "model=users"]) == 0
    assert capsys.readouterr().out == f"# {own}\n{own.read_text()}\n"
    assert main(["train", "--config-dir", "mine", "--help"]) == 0
    assert re.search(r"^  model .*\busers\b", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "files"),
    [
        ("", "train"),
        ("loss=focal", "loss/focal"),
        ("loss/focal", "loss/focal"),
        ("data=digits", "data/digits data/_base"),
    ],
)
def test_show_prints_the_files_of_an_option_and_without_words_every_key(words, files, capsys):
    assert main(["show", *words.split()]) == 0
    text = capsys.readouterr().out
    for path in (shipped() / f"{name}.yaml" for name in files.split()):
        assert f"# {path}\n{path.read_text()}" in text


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_of_a_verb_says_what_it_does_and_lists_groups_and_keys_with_their_comments(verb, capsys, workdir):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(VERBS[verb].help)
    groups = Sources().groups() if VERBS[verb].takes_config else []
    for group in groups:
        assert re.search(rf"^  {group} +{', '.join(o.name for o in Sources().options(group))}$", text, re.MULTILINE)
    for key in hints(SCHEMAS[verb]) if groups else ():
        assert key in groups or re.search(rf"^  {key}:(.*  # \S|$)", text, re.MULTILINE), key
    assert "hydra:" not in text
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("word", ["--json", "json=true", "json=-"])
def test_json_has_one_meaning_however_it_is_spelled(accepted, trained, word):
    assert "torch" in json.dumps(json.loads(accepted("env", word).out))
    assert len(json.loads(accepted("report", str(trained), word).out)["runs"]) == 1
    for name, verb in VERBS.items():
        if "json" in (SCHEMAS[name].__dataclass_fields__ if verb.takes_config else ()):
            assert verb.expand_shorthand(["seed=1", word]) == ["seed=1", "json=true"]


@pytest.mark.parametrize(
    ("verb", "words", "meant"),
    [
        ("audit", "vary=threads:0,2 +vary=amp:bf16 vary={seed:1}", "vary.threads=[0,2] vary.amp=bf16 vary={seed:1}"),
        ("check", "only=labels,logits skip=modes", "only=[labels,logits] skip=[modes]"),
        ("check", "only=labels,logits -m", "only=[labels,logits] -m"),
        ("check", "--json --strict --train seed=1", "json=true strict=true train=true seed=1"),
        ("inspect", "features=a.b,c +what=layers what=null", "features=[a.b,c] +what=[layers] what=null"),
        ("inspect", "tensors=[x] seed=1,2 output=a,b", "tensors=[x] seed=1,2 output=a,b"),
    ],
)  # fmt: skip
def test_short_words_are_spelled_out_before_hydra_sees_them(verb, words, meant):
    assert VERBS[verb].expand_shorthand(words.split()) == meant.split()


def test_the_module_and_the_command_are_the_same_program():
    command = [sys.executable, "-m", "runner", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"runner {__version__}\n")
    project = tomllib.loads((shipped().parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"runner": "runner.__main__:main"}
