"""What the tests of several verbs share: a run that is trained once for all tests of a file."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from runner.cli import main


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the words in the file's `SMALL`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(tmp_path_factory.mktemp("made"))
        assert (
            main(["train", "threads=1", "logger=none", "log.progress=false", "log.curves=false", *request.module.SMALL])
            == 0
        )
        return Path(out.getvalue().splitlines()[-1]).resolve()


@pytest.fixture
def trained(made: Path, workdir: Path) -> Path:
    """A copy of it, in the folder of the test."""
    return Path(shutil.copytree(made, workdir / "outputs" / "data" / made.name))
