"""What the tests of the command line share: a checkpoint to work on."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

# Half a second of training: 29 samples for it, 3 to validate on, one step.
TINY = (
    *("threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu"),
    *("data=synthetic", "data.dataset.samples=32", "data.image_size=8", "model=small_cnn", "model.width=4"),
    *("epochs=1", "evaluate.test=false"),
)


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides that make `train` as small as it can be."""
    return TINY


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished tiny run; to be read only."""
    from runner.cli import main

    folder = tmp_path_factory.mktemp("trained")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        patch.delenv("RUNNER_TRUST", raising=False)
        assert main(["train", *TINY, "name=first"]) == 0
    return folder / out.getvalue().strip().splitlines()[-1]
