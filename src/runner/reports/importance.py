"""How much a metric depends on each key: permutation importance of a random forest on runs that it was not fitted to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from runner.config.reading import is_number
from runner.reports.reading import Run

_FEWEST_RUNS = 12
_FOLDS = 5
_TREES = 50
_REPEATS = 5


def importance(runs: Sequence[Run], keys: Sequence[str], metric: str | None) -> dict[str, Any]:
    """The importance of keys.

    Returns:
        `keys`, `mean` and `std` (the decrease of R² when a key's values are shuffled, over folds and shufflings), `score` (the
        R² itself on runs held out) and `count` of runs; or a `note` why there is none.
    """
    used = [run for run in runs if run.status == "finished" and metric is not None and metric in run.metrics]
    if not keys:
        return {"note": "no key differs between these runs"}
    if len(used) < _FEWEST_RUNS:
        return {"note": f"{len(used)} finished runs are too few; {_FEWEST_RUNS} are needed"}
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold

    inputs = np.array([_numbers([run.value(key) for run in used]) for key in keys]).T
    targets = np.array([run.metrics[str(metric)] for run in used])
    predicted, decreases = np.zeros_like(targets), []
    for fold, (fitted, held_out) in enumerate(KFold(_FOLDS, shuffle=True, random_state=0).split(inputs)):
        forest = RandomForestRegressor(_TREES, random_state=fold).fit(inputs[fitted], targets[fitted])
        predicted[held_out] = forest.predict(inputs[held_out])
        found = permutation_importance(
            forest, inputs[held_out], targets[held_out], scoring="r2", n_repeats=_REPEATS, random_state=fold
        )
        decreases.append(found.importances)
    together = np.concatenate(decreases, axis=1)
    order = np.argsort(-together.mean(axis=1))
    return {
        "keys": [keys[at] for at in order],
        "mean": [float(f"{together[at].mean():.4g}") for at in order],
        "std": [float(f"{together[at].std(ddof=1):.4g}") for at in order],
        "score": float(f"{r2_score(targets, predicted):.3g}"),
        "count": len(used),
    }


def _numbers(values: list[Any]) -> list[float]:
    """Values as numbers that a forest can divide; names in their order."""
    if all(is_number(value) for value in values):
        return [float(value) for value in values]
    names = sorted({json.dumps(value, default=str) for value in values})
    return [float(names.index(json.dumps(value, default=str))) for value in values]
