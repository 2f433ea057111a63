"""An untrusted config that would download or write in some section: nothing is fetched and nothing is written elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.forging import with_config
from faults.jobs import directory, whole
from faults.lives import Prepare, live
from faults.table import Bench, Row

Node = dict[str, Any]
PLACES = (
    *(
        "data.dataset",
        "data.dataset.inner",
        "model",
        "model.inner",
        "loss",
        "loss.inner",
        "optimizer",
        "scheduler",
        "task",
    ),
    *("metrics.x", "metrics.x.inner", "callbacks.x", "logger.x", "transform.sample_train", "transform.sample_eval"),
    *("transform.train", "transform.eval", "transform.mix"),
)
TARGETS: dict[str, Node] = {
    "torchvision's MNIST": {"_target_": "torchvision.datasets.MNIST", "root": "OUTSIDE", "download": True},
    "the program's KMNIST": {"_target_": "runner.data.sources.torchvision_sets.kmnist", "root": "OUTSIDE", "download": True},
    "pretrained weights": {"_target_": "torchvision.models.resnet18", "pretrained": True},
    "weights by name": {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"},
    "weights of a backbone by default": {"_target_": "torchvision.models.segmentation.lraspp_mobilenet_v3_large"},
    "weights of the program's builder": {
        "_target_": "runner.models.torchvision_zoo.classifier", "name": "squeezenet1_1", "num_classes": 10,
        "weights": "DEFAULT", "fetch_weights": True,
    },
    "a download by its function": {
        "_target_": "torchvision.datasets.utils.download_url", "url": "http://localhost/x", "root": "OUTSIDE"},
    "a file by torch.save": {"_target_": "torch.save", "obj": 1, "f": "OUTSIDE/x"},
}  # fmt: skip


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    from runner.checkpoint.file import read

    row = Row("downloads", "nothing fetched, nothing written elsewhere")
    ours = bench.folder / "ours"
    first = live([*whole(("epochs=2", "max_steps=3", "callbacks=none")), directory(ours)], bench.folder / "ours.log")
    assert first.status == 0, first.said()[-2000:]
    contents = read(ours / "checkpoints" / "last.safetensors")
    cases = [(place, what) for place in PLACES for what in TARGETS]
    count = bench.counts["downloads"]
    for number, (place, what) in enumerate(bench.draw.sample(cases, count) if count else cases):
        verb = ("eval", "train")[number % 2]
        broken = _try(contents, place, what, verb, bench.folder / str(number))
        row.count(f"{verb} with {what} in {place}: {broken}" if broken else "", bench.say)
        shutil.rmtree(bench.folder / str(number), ignore_errors=True)
    row.note = f"{len(PLACES)} places by {len(TARGETS)} targets in all"
    return [row]


def _try(contents: dict[str, Any], place: str, what: str, verb: str, folder: Path) -> str:
    outside, user = folder / "outside", folder / "user"
    for path in (outside, user, folder / "home"):
        path.mkdir(parents=True)
    node = {
        name: value.replace("OUTSIDE", str(outside)) if isinstance(value, str) else value
        for name, value in TARGETS[what].items()
    }
    sent = folder / "sent.safetensors"
    sent.write_bytes(with_config(contents, _putting(place, node)))
    words = [f"ckpt_path={sent}"]
    words += (
        [f"output={folder / 'home' / 'out'}", "split=val"] if verb == "eval" else [directory(folder / "home" / "run")]
    )
    life = live(words, folder / "log", _alone(folder), verb)
    said = life.said()
    written = sorted(str(path.relative_to(folder)) for path in (*outside.rglob("*"), *user.rglob("*")))
    if (folder / "home" / "connected").exists():
        return "it reached for the network"
    if written:
        return f"it wrote {written}"
    if life.status not in (0, 2) or "Traceback" in said or (life.status and "error: " not in said):
        return f"status {life.status}: {said[-1200:]}"
    return ""


def _putting(place: str, node: Node) -> Callable[[dict[str, Any]], None]:
    """Put a component at a place of the config: alone, or nested as an argument of what stands there."""

    def change(config: dict[str, Any]) -> None:
        *parents, last = place.split(".")
        section = config
        for part in parents:
            section[part] = section.get(part) or {}
            section = section[part]
        listed = parents == ["transform"] and last != "mix"
        if place in ("metrics.x.inner",):
            section["_target_"] = "torchmetrics.MeanMetric"
        section[last] = [node] if listed else node

    return change


def _alone(folder: Path) -> Prepare:
    """An empty home and an empty folder to start in, and no network: whoever reaches for it leaves a mark."""

    def prepare() -> None:
        os.environ["HOME"] = str(folder / "user")
        os.environ["TORCH_HOME"] = str(folder / "user" / "torch")
        os.environ["MPLCONFIGDIR"] = str(folder.parent / "matplotlib")
        os.chdir(folder / "home")

        def refuse(*args: Any, **options: Any) -> Any:
            (folder / "home" / "connected").touch()
            raise OSError("there is no network here")

        socket.create_connection = refuse  # type: ignore[assignment]
        socket.getaddrinfo = refuse  # type: ignore[assignment]
        socket.socket.connect = refuse  # type: ignore[assignment, method-assign]

    return prepare
