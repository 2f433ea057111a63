"""A release: one version everywhere, and a tag that is checked before anything is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from docs_pages import PAGES, REPOSITORY

import runner
from runner.cli import main

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the check of a tag reads, and a Python that ends the check where the build begins."""
    for name in ("scripts/check_release.sh", "pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no build\nexit 9\n")
    python.chmod(0o755)
    return tmp_path


def check(checkout: Path, tag: str) -> str:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    command = [str(checkout / "scripts" / "check_release.sh"), tag]
    ended = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return ended.stdout + ended.stderr


def test_the_version_is_that_of_the_package_the_changelog_and_the_wheel_in_the_docs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runner.__version__ == VERSION
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"runner {VERSION}\n"
    sections = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", sections[1])
    pages = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "README.md", *PAGES)]
    assert set(re.findall(r"runner-([\w.]+)-py3", "\n".join(pages))) == {VERSION}


def test_a_tag_of_another_version_and_a_version_without_a_section_are_refused_before_the_build(checkout: Path) -> None:
    said = check(checkout, "v0.0.9")
    assert f"error: the tag is v0.0.9, and pyproject.toml has version {VERSION}" in said
    assert "no build" not in said
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace(f"\n## {VERSION} - ", "\n## 0.0.9 - "))
    said = check(checkout, f"v{VERSION}")
    assert f"error: CHANGELOG.md has no section '## {VERSION}'" in said
    assert "no build" not in said


def test_the_notes_of_a_release_are_its_section_of_the_changelog(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(f"{CHANGELOG}\n## 0.0.9 - 2026-01-01\n\n- Older.\n")
    assert "no build" in check(checkout, f"v{VERSION}")
    section = re.search(rf"^## {re.escape(VERSION)} .*?\n(.*?)(?=^## |\Z)", CHANGELOG, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert (checkout / "build" / "notes.md").read_text().strip() == section[1].strip()
