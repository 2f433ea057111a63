"""A program that follows the documentation and knows model.json and model.onnx says of image files what `predict` says.

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
from PIL import Image, ImageOps

from runner.config.schema.sections import Data
from runner.data.sources.image_files import ImageFiles

pytestmark = needs("export")
IMAGES = 36  # each mode with each note of how the camera was held


def read(path: Path, height: int, width: int, channels: int, share: float = 1.0, turn: bool = True) -> np.ndarray:
    """Pixels (C, H, W) of a file, as the page of `export` says."""
    mode = "RGB" if channels == 3 else "L"
    image: Any = Image.open(path)
    sides, short, reduction = image.size, min(image.size), 1
    edge = max(1, round(share * short))
    if image.format == "JPEG":
        if height == width:
            reduction = next((each for each in (8, 4, 2) if edge >= each * height), 1)
        image.draft(mode, tuple(max(1, side // reduction) for side in sides))
    reduced = image.size
    if turn:
        image = ImageOps.exif_transpose(image)
        sides = sides if image.size == reduced else sides[::-1]
    if height == width:
        columns = rows = edge
        left, top = ((side - edge) // 2 for side in sides)
    else:
        scale = min(sides[1] / height, sides[0] / width)
        columns, rows = (min(side, max(1, round(scale * to))) for side, to in zip(sides, (width, height), strict=True))
        left, top = (sides[0] - columns) // 2, (sides[1] - rows) // 2
    if reduction > 1:
        left, top, columns, rows = (round(number / reduction) for number in (left, top, columns, rows))
        columns, rows = min(columns, image.width), min(rows, image.height)
        left, top = min(left, image.width - columns), min(top, image.height - rows)
    image = image.crop((left, top, left + columns, top + rows))
    if image.mode.startswith("I"):
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    pixels = np.asarray(image.convert(mode).resize((width, height), Image.Resampling.BILINEAR))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


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
def test_a_reader_that_follows_the_documentation_agrees_with_predict_on_every_image(
    train: Any, accepted: Any, workdir: Path, photographs: Path, words: tuple[str, ...]
) -> None:
    import onnxruntime

    trained = train_folder(train, workdir, *(word for word in words if "export." not in word))
    included = [word.removeprefix("export.") for word in words if word.startswith("export.")]
    accepted("export", "threads=1", f"ckpt_path={trained.directory}", "format=onnx", "batch_sizes=[1]", *included)
    table = Path("predictions.jsonl")
    accepted(
        "predict", "threads=1", f"ckpt_path={trained.directory}", f"input={photographs}", f"output={table}",
        "probabilities=true", "data.num_workers=0",
    )  # fmt: skip
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    expected = {row["path"]: row["probabilities"] for row in rows}
    folder = trained.directory / "export"
    description = json.loads((folder / "model.json").read_text())
    session = onnxruntime.InferenceSession(str(folder / description["files"]["onnx"]["file"]))
    paths = sorted(photographs.iterdir())
    assert len(paths) == len(expected) == IMAGES + 3
    told = np.array([expected[str(path)] for path in paths])

    facts = description["preprocessing"]
    mean, std = (np.array(facts[name]).reshape(-1, 1, 1) for name in ("mean", "std"))

    def said(turn: bool = True) -> np.ndarray:
        size, channels = facts["image_size"], {"RGB": 3, "grey": 1}[facts["colours"]]
        share = facts["data"].get("crop_share", 1.0)
        images = [read(path, size[0], size[1], channels, share, turn) for path in paths]
        if not facts["normalization_in_the_model"]:
            images = [((image / 255 - mean) / std).astype(np.float32) for image in images]
        return asked(session, description, images)

    found = said()
    assert np.abs(found - told).max() < 2e-3
    clear = np.abs(told[:, 0] - told.max(1)) + np.abs(told[:, 1] - told.max(1)) > 4e-3
    assert (found.argmax(1) == told.argmax(1))[clear].all()
    assert np.abs(said(turn=False) - told).max() > 5e-3  # such a difference is seen


@pytest.mark.parametrize("shape", some([(3, 12, 20), (1, 31, 10), (3, 24, 24)], 1, 2), ids=str)
def test_the_documentation_gives_the_pixels_that_a_model_of_any_shape_is_given(
    photographs: Path, shape: tuple[int, int, int]
) -> None:
    paths = sorted(photographs.iterdir())
    files = ImageFiles(paths, Data(dataset={}, max_pixels=10**6), [], shape)
    for path in paths:
        apart = np.abs(files.read(path).numpy().astype(int) - read(path, *shape[1:], shape[0]).astype(int))
        assert apart.max() <= 1, path
