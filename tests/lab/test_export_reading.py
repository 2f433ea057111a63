"""A program that knows nothing but model.json and model.onnx says of image files what `predict` says.

The reader below uses Pillow and NumPy, and nothing of the project.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extended import some
from extras import needs
from PIL import Image

from runner.config.schema.sections import Data
from runner.data.sources.image_files import ImageFiles, reading_steps
from runner.data.sources.image_io import Decoding

pytestmark = needs("export")
IMAGES = 36  # each mode with each note of how the camera was held


class Reader:
    """Follows the steps that a description lists, skipping some."""

    def __init__(self, description: dict[str, Any], without: str = "") -> None:
        self.steps = [step for step in description["preprocessing"]["steps"] if step["step"] != without]
        known = {name.removeprefix("do_") for name in vars(Reader) if name.startswith("do_")}
        assert {step["step"] for step in self.steps} <= known

    def __call__(self, path: Path) -> np.ndarray:
        self.path, self.reduction, self.edge, self.top, self.left = path, 1, 0, 0, 0
        self.names: dict[str, Any] = {}
        for step in self.steps:
            getattr(self, f"do_{step['step']}")(step)
        return self.pixels

    def formula(self, text: str) -> int:
        allowed = {"round": round, "min": min, "max": max}
        return eval(text, {"__builtins__": {}}, allowed | self.names)  # the tests' own text

    def do_open(self, step: dict[str, Any]) -> None:
        self.image: Any = Image.open(self.path, formats=step["formats"])
        self.image.seek(step["frame"])

    def do_measure(self, step: dict[str, Any]) -> None:
        width, height = self.image.size
        if self.image.getexif().get(step["exif_tag"], 1) in step["swap_sides_for"]:
            width, height = height, width
        self.names |= {"width": width, "height": height}

    def do_region(self, step: dict[str, Any]) -> None:
        for name in ("edge", "top", "left"):
            self.names[name] = self.formula(step[name])

    def do_draft(self, step: dict[str, Any]) -> None:
        self.tag = self.image.getexif()
        if self.image.format not in step["formats"]:
            return
        fitting = (each for each in step["reductions"] if self.names["edge"] >= each * step["smallest_edge"])
        self.reduction = next(fitting, 1)
        sides = [max(1, side // self.reduction) for side in self.image.size]
        self.image.draft(step["mode"], tuple(sides))

    def do_turn(self, step: dict[str, Any]) -> None:
        name = step["transpose"].get(str(self.tag.get(step["exif_tag"], 1)))
        if name is not None:
            self.image = self.image.transpose(Image.Transpose[name])

    def do_crop(self, step: dict[str, Any]) -> None:
        if "scale" in step:
            width, height = self.image.size
            self.names |= {"width": width, "height": height}
            for name in ("scale", "rows", "columns", "top", "left"):
                self.names[name] = self.formula(step[name])
            top, left, rows, columns = (self.names[name] for name in ("top", "left", "rows", "columns"))
        else:
            top, left, rows = (self.names[name] for name in ("top", "left", "edge"))
            columns, (width, height) = rows, self.image.size
            if self.reduction > 1:
                top, left, edge = (round(number / self.reduction) for number in (top, left, rows))
                rows, columns = min(edge, height), min(edge, width)
                top, left = min(top, height - rows), min(left, width - columns)
        self.image = self.image.crop((left, top, left + columns, top + rows))

    def do_convert(self, step: dict[str, Any]) -> None:
        if self.image.mode in step["sixteen_bit_grey"]["modes"]:
            self.names["value"] = np.asarray(self.image).astype(np.uint32)
            self.image = Image.fromarray(self.formula(step["sixteen_bit_grey"]["value"]).astype(np.uint8))
        elif self.image.has_transparency_data:
            above = self.image.convert("RGBA")
            self.image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
        self.image = self.image.convert(step["mode"])

    def do_resize(self, step: dict[str, Any]) -> None:
        assert (step["filter"], step["antialias"], step["dtype"]) == ("bilinear", True, "uint8")
        self.image = self.image.resize((step["width"], step["height"]), Image.Resampling.BILINEAR)

    def do_layout(self, step: dict[str, Any]) -> None:
        assert step["axes"] == "channels, height, width"
        pixels = np.asarray(self.image)
        self.pixels = pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]

    def do_dtype(self, step: dict[str, Any]) -> None:
        self.pixels = self.pixels.astype(step["dtype"])

    def do_normalise(self, step: dict[str, Any]) -> None:
        mean, std = (np.array(step[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        assert step["value"] == "(pixel / 255 - mean) / std"
        self.pixels = ((self.pixels / 255 - mean) / std).astype(step["dtype"])


def photograph(number: int, mode: str) -> Image.Image:
    """A picture that is different at each place and upside down, of a size of its own."""
    random = np.random.default_rng(number)
    width, height = (int(side) for side in random.integers(12, 420, 2))
    coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height))
    fine = np.asarray(coarse).astype(int) + random.integers(-25, 25, (height, width, 1))
    return Image.fromarray(fine.clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of many kinds; to be read only."""
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(IMAGES):
        mode = ("RGB", "RGB", "L", "CMYK")[number % 4]
        exif = Image.Exif()
        if turn := (number // 4) % 9:  # 0 is a picture without a note
            exif[0x0112] = turn
        photograph(number, mode).save(folder / f"{number:03}.jpg", quality=92, exif=exif)
    photograph(100, "RGB").convert("P").save(folder / "palette.png")
    photograph(101, "RGBA").save(folder / "clear.png")
    deep = np.asarray(photograph(102, "L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(folder / "deep.png")
    return folder


def train_folder(train: Callable[..., Any], workdir: Path, *words: str) -> Any:
    for number in range(12):
        folder = workdir / "data" / ("ab"[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        photograph(200 + number, "RGB").save(folder / f"{number}.png")
    return train(
        "data=image_folder", f"data.root={workdir}/data", "data.batch_size=4", "data.split.test=0", "epochs=1",
        "model=small_cnn", "model.width=8", "model.dropout=0", "evaluate.test=false", "optimizer.lr=0.02", *words,
    )  # fmt: skip


def probabilities(path: Path) -> dict[str, list[float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["path"]: row["probabilities"] for row in rows}


def asked(session: Any, description: dict[str, Any], images: list[np.ndarray]) -> np.ndarray:
    name, out = description["input"]["name"], description["output"]["name"]
    outputs = np.concatenate([session.run([out], {name: image[None]})[0] for image in images])
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)  # type: ignore[no-any-return]


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    some(
        [
            ("data.image_size=24",),
            ("data.image_size=24", "data.dataset.crop_share=0.8", "export.include_preprocessing=true"),
            ("data.image_size=24", "data.dataset.channels=1", "data.normalize.mean=[0.5]", "data.normalize.std=[0.25]"),
        ],
        1,
    ),
    ids=" ".join,
)
def test_a_reader_of_the_description_agrees_with_predict_on_every_image(
    train: Callable[..., Any], run: Callable[..., Any], workdir: Path, photographs: Path, words: tuple[str, ...]
) -> None:
    agrees(run, train_folder(train, workdir, *(word for word in words if "export." not in word)), photographs, words)


@pytest.mark.parametrize("shape", some([(3, 12, 20), (1, 31, 10), (3, 24, 24)], 1, 2), ids=str)
def test_the_steps_give_the_pixels_that_a_model_of_any_shape_is_given(
    photographs: Path, shape: tuple[int, int, int]
) -> None:
    paths = sorted(photographs.iterdir())
    steps = reading_steps(Data(dataset={"_target_": "elsewhere.images"}), [], shape)
    reader = Reader({"preprocessing": {"steps": [*steps, {"step": "layout", "axes": "channels, height, width"}]}})
    size = shape[1] if shape[1] == shape[2] else None
    files = ImageFiles(paths, shape, Decoding(size, 1 if shape[0] == 1 else 3, 1.0, 10**6), [])
    for index, path in enumerate(paths):
        apart = np.abs(files[index][0].numpy().astype(int) - reader(path).astype(int))
        assert apart.max() <= 1, path


def agrees(run: Callable[..., Any], trained: Any, photographs: Path, words: tuple[str, ...]) -> None:
    import onnxruntime

    included = [word.removeprefix("export.") for word in words if word.startswith("export.")]
    exported = run("export", "threads=1", f"ckpt_path={trained.directory}", "format=onnx", "batch_sizes=[1]", *included)
    assert exported.status == 0, exported.err
    table = Path("predictions.jsonl")
    predicted = run(
        "predict", "threads=1", f"ckpt_path={trained.directory}", f"input={photographs}", f"output={table}",
        "probabilities=true", "data.num_workers=0",
    )  # fmt: skip
    assert predicted.status == 0, predicted.err
    expected = probabilities(table)
    folder = trained.directory / "export"
    description = json.loads((folder / "model.json").read_text())
    session = onnxruntime.InferenceSession(str(folder / description["files"]["onnx"]["file"]))
    paths = sorted(photographs.iterdir())
    assert len(paths) == len(expected) == IMAGES + 3
    told = np.array([expected[str(path)] for path in paths])

    def said(without: str = "") -> np.ndarray:
        reader = Reader(description, without)
        return asked(session, description, [reader(path) for path in paths])

    found = said()
    assert np.abs(found - told).max() < 2e-3
    clear = np.abs(told[:, 0] - told.max(1)) + np.abs(told[:, 1] - told.max(1)) > 4e-3
    assert (found.argmax(1) == told.argmax(1))[clear].all()
    # The description is not longer than it has to be: without a step, it is another model.
    for step in ("turn", *(("draft",) if "draft" in words else ())):
        assert np.abs(said(step) - told).max() > 5e-3, step
