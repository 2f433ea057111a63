"""All ranks have the time of rank 0 from the start, and stop for the same reason."""

from __future__ import annotations

import json
from pathlib import Path

import agreement_ranks
import pytest

from rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.extended
def test_ranks_whose_clocks_differ_agree(pool: RankPool, tmp_path: Path) -> None:
    pool(agreement_ranks.on_a_rank, tmp_path, 2)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [5.0, "", 6.0, "SIGTERM"]
