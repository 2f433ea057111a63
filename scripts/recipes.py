"""Reruns a recipe of docs/recipes.md with several seeds, and compares it with the stored curves.

    python scripts/recipes.py cifar10_airbench --seeds 3 data.root=path/to/data
    python scripts/recipes.py cifar10_airbench --store data.root=path/to/data

Overrides go to each run. Prints the accuracy of each seed after the last epoch, with and without test-time augmentation, the
samples trained per second, the epoch that reaches each level without it, and mean and standard deviation over the seeds. Exit
status 4 if `report` finds the runs worse than `scripts/recipes/NAME.json`, 1 if their mean is below the bar; `--store` writes
that file, and the plot of docs/recipes.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORED = Path(__file__).resolve().parent / "recipes"
PLOTS = Path(__file__).resolve().parents[1] / "docs" / "assets"


@dataclass(frozen=True)
class Recipe:
    """An experiment, the mean accuracy to reach, levels on the way, and the views of its test-time augmentation, if any."""

    bar: float
    levels: tuple[float, ...]
    tta: str | None = None


RECIPES = {
    "cifar10_airbench": Recipe(0.94, (0.9, 0.93, 0.94), "[flip,shifts]"),
    "cifar10_resnet18": Recipe(0.93, (0.93, 0.94, 0.95)),
    "fashion_mnist_airbench": Recipe(0.945, (0.92, 0.94, 0.945)),
    "imagenette_128": Recipe(0.87, (0.8, 0.85, 0.8743)),  # the last is that of the leaderboard
    "imagenette_noisy": Recipe(0.85, (0.8, 0.8344)),  # the same
}


def runner(*words: str) -> str:
    """The output of a verb, which must succeed."""
    return subprocess.run(
        [sys.executable, "-m", "runner", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def records(directory: Path, split: str) -> list[dict[str, Any]]:
    """The logged lines of a run: of training, or of its evaluations."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def plot(name: str, recipe: Recipe, curves: list[list[dict[str, Any]]], views: list[float]) -> None:
    """Draw the accuracy of each seed after each epoch, and a dot for the one that counts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for seed, (curve, view) in enumerate(zip(curves, views, strict=True)):
        epochs = [line["epoch"] for line in curve]
        (line,) = axes.plot(epochs, [line["accuracy"] for line in curve], label=f"seed {seed}")
        axes.plot(epochs[-1:], [view], "o", color=line.get_color())
    axes.axhline(recipe.bar, color="grey", linestyle=":")
    axes.set(
        xlabel="epoch", ylabel="test accuracy", title=f"{name}; dots: with tta={recipe.tta}" if recipe.tta else name
    )
    axes.legend()
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOTS / f"recipe_{name}.png", dpi=100)


def main() -> int:
    """Run a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the sweep; a sweep in it is continued")
    parser.add_argument("--store", action="store_true", help="write the runs as those to compare with")
    parser.add_argument("words", nargs="*", help="overrides")
    given = parser.parse_intermixed_args()
    recipe, folder = RECIPES[given.name], given.folder or Path("outputs/recipes") / given.name
    seeds = f"seed={','.join(map(str, range(given.seeds)))}"
    sweep = ("--multirun", f"experiment={given.name}", seeds, f"hydra.sweep.dir={folder}", "logger=none", *given.words)
    subprocess.run([sys.executable, "-m", "runner", "train", *sweep], check=True)
    curves, views = [], []
    for directory in sorted(path.parent for path in folder.glob("*/summary.json")):
        evaluations = records(directory, "val")
        curves.append(evaluations)
        views.append(evaluations[-1]["accuracy"])
        if recipe.tta:
            last = f"ckpt_path={directory}/checkpoints/last.safetensors"
            found = json.loads(runner("eval", last, "split=val", f"tta={recipe.tta}", "json=true"))
            views[-1] = found["tta"]["metrics"]["accuracy"]
        rate = statistics.median(line["samples_per_s"] for line in records(directory, "train"))
        print(
            f"{directory.name}: accuracy {evaluations[-1]['accuracy']:.4f}, "
            + (f"with tta {views[-1]:.4f}, " if recipe.tta else "")
            + f"{rate:.0f} samples/s"
        )
        for level in recipe.levels:
            reached = [line["epoch"] for line in evaluations if line["accuracy"] >= level]
            print(f"  {level:.1%}: {f'epoch {reached[0]}' if reached else 'not reached'}")
    plain = [evaluations[-1]["accuracy"] for evaluations in curves]
    for name, values in (("accuracy", plain), ("with tta", views))[: 2 if recipe.tta else 1]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.4f}, standard deviation {spread:.4f}, {len(values)} seeds")
    if given.store:
        STORED.mkdir(exist_ok=True)
        plot(given.name, recipe, curves, views)
    file = STORED / f"{given.name}.json"
    word = f"save_baseline={file}" if given.store else f"against={file}"
    status = 0
    if given.store or file.exists():
        status = subprocess.run([sys.executable, "-m", "runner", "report", str(folder), word], check=False).returncode
    return status or int(statistics.mean(views) < recipe.bar)


if __name__ == "__main__":
    sys.exit(main())
