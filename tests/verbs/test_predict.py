"""`predict` says of images what the checkpoint's model says of them, whatever the files are like."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_reader import read_image
from PIL import EpsImagePlugin, Image

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.data.module import DataModule
from runner.data.sources.image_files import fitted
from runner.data.sources.synthetic import synthetic
from runner.models.features import Extractor
from runner.verbs.predict.run import files_in

DATA = (
    "data=synthetic", "data.dataset.samples=60", "data.dataset.classes=4", "data.image_size=8", "data.split.val=0.3",
)  # fmt: skip
SMALL = (*DATA, "data.batch_size=8", "epochs=1", "model=small_cnn", "model.width=4", "optimizer.lr=0.02")
CALL = ("predict", "threads=1")


@pytest.fixture
def predict(accepted: Callable[..., Any], trained: Path) -> Callable[..., list[dict[str, Any]]]:
    """Rows of a prediction that must succeed."""

    def call(*words: str) -> list[dict[str, Any]]:
        accepted(*CALL, f"ckpt_path={trained}", "output=rows.jsonl", *words)
        return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]

    return call


def save(path: Path, image: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    Image.fromarray(planes.numpy()).save(path)


@pytest.fixture
def photos(workdir: Path) -> Path:
    """The images of the test split as files, by their number."""
    images = synthetic(samples=60, classes=4, image_size=8)["test"].images
    for number, image in enumerate(images):
        save(workdir / "photos" / f"{number:02d}.png", image)
    return workdir / "photos"


def cells() -> list[dict[str, str]]:
    """What `rows.csv` holds."""
    with Path("rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("words", "error"), [((), 1e-6), (("dtype=float64",), 1e-12)], ids=["float32", "float64"])
def test_a_file_gets_the_logits_of_its_sample_which_is_right_as_often_as_eval_says(
    words: tuple[str, ...], error: float, train: Any, predict: Any, json_of: Any, photos: Path, trained: Path
) -> None:
    checkpoint = f"ckpt_path={train(*SMALL, *words).directory if words else trained}"
    by_split = {row["sample"]: row for row in predict(checkpoint, "input=test", "logits=true")}
    by_file = {int(Path(row["path"]).stem): row for row in predict(checkpoint, "input=photos", "logits=true")}
    assert sorted(by_file) == sorted(by_split) == list(range(15))
    for number, row in by_split.items():
        assert by_file[number]["logits"] == pytest.approx(row["logits"], rel=error, abs=error)
        assert by_file[number]["prediction"] == row["prediction"]
    assert len(predict(checkpoint, "input=photos", "tta=hflip")) == 15
    right = sum(row["prediction"] == row["target"] for row in by_split.values()) / 15
    found = json_of("eval", "threads=1", checkpoint)
    assert right == pytest.approx(found["metrics"]["accuracy"])


def test_three_broken_images_are_named_and_the_rest_predicted(accepted: Any, trained: Path, photos: Path) -> None:
    (photos / "03.png").write_bytes(b"not an image")
    (photos / "07.png").write_bytes((photos / "08.png").read_bytes()[:40])
    (photos / "11.png").write_bytes(b"")
    result = accepted(*CALL, f"ckpt_path={trained}", "input=photos", "output=rows.csv", "evaluate.batch_size=7")
    assert "3 images were not predicted" in result.out
    for name in ("03.png", "07.png", "11.png"):
        assert f"photos/{name}" in result.out
    rows = cells()
    assert [row["path"] for row in rows] == [f"photos/{n:02d}.png" for n in range(15) if n not in (3, 7, 11)]
    listed = Path("rows_unreadable.txt").read_text()
    assert listed.count("\n") == 3
    assert "photos/07.png" in listed


def test_a_broken_image_among_workers_changes_no_other_row(predict: Any, photos: Path) -> None:
    whole = predict("input=photos", "logits=true")
    (photos / "09.png").write_bytes(b"not an image")
    rows = predict("input=photos", "logits=true", "data.num_workers=1", "evaluate.batch_size=15")
    assert [row["path"] for row in rows] == [row["path"] for row in whole if "09" not in row["path"]]
    kept = [row["logits"] for row in whole if "09" not in row["path"]]
    torch.testing.assert_close(torch.tensor([row["logits"] for row in rows]), torch.tensor(kept))


def test_strict_ends_the_call_and_leaves_no_file(rejected: Any, trained: Path, photos: Path) -> None:
    (photos / "03.png").write_bytes(b"not an image")
    result = rejected(*CALL, f"ckpt_path={trained}", "input=photos", "output=rows.csv", "strict=true")
    assert "03.png" in result.err
    assert "strict=false" in result.err
    assert not list(Path().glob("*rows*"))


def test_files_folders_patterns_and_several_of_them_come_in_order_and_once(predict: Any, photos: Path) -> None:
    save(photos / "more" / "x.jpg", torch.zeros((3, 8, 8), dtype=torch.uint8))
    (photos / "notes.txt").write_text("no image")
    (photos / ".hidden.png").write_bytes((photos / "00.png").read_bytes())
    shutil.copy(photos / "00.png", photos / "without_ending")

    def paths(*words: str) -> list[str]:
        return [str(path).removeprefix("photos/") for path in files_in(words)]

    assert paths("photos/05.png", "photos/without_ending") == ["05.png", "without_ending"]
    assert paths("photos/0?.png") == [f"0{n}.png" for n in range(10)]
    assert paths("photos/**/x.*") == ["more/x.jpg"]
    rows = predict("input=photos/14.png,photos/without_ending,photos")
    everything = [row["path"].removeprefix("photos/") for row in rows]
    assert everything[:3] == ["14.png", "without_ending", "00.png"]
    assert everything[-1] == "more/x.jpg"
    assert len(everything) == 17


def test_a_pattern_goes_into_each_folder_once_however_many_links_lead_there(workdir: Path) -> None:
    save(workdir / "photos" / "deep" / "a.png", torch.zeros((3, 8, 8), dtype=torch.uint8))
    save(workdir / "photos" / ".hidden" / "b.png", torch.zeros((3, 8, 8), dtype=torch.uint8))
    save(workdir / "other" / "c.PNG", torch.zeros((3, 8, 8), dtype=torch.uint8))
    for number in range(4):  # with four links to itself, glob would come by 4 ** 40 times
        (workdir / "photos" / f"again{number}").symlink_to(workdir / "photos")
    (workdir / "photos" / "linked").symlink_to(workdir / "other")
    expected = ["photos/deep/a.png", "photos/linked/c.PNG"]
    for pattern in ("photos/**/*.*", "photos/**", "ph*/**/*", f"{workdir}/photos/**/?.*", "photos/**/**/*.[pP]*"):
        found = [os.path.relpath(path, workdir) for path in files_in([pattern])]
        assert found == expected, pattern
    assert [str(path) for path in files_in(["**/deep/*.png"])] == ["photos/deep/a.png"]


@pytest.mark.parametrize("word", ["photos", "photos/**/*.png"])
def test_a_folder_that_cannot_be_read_is_a_sentence(
    word: str, rejected: Any, trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "locked").mkdir()
    scandir = os.scandir

    def refusing(path: Any = ".") -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    result = rejected(*CALL, f"ckpt_path={trained}", f'input="{word}"', "output=rows.csv")
    assert "cannot read the folder photos/locked: permission denied" in result.err


def test_what_is_no_image_is_listed_with_the_reason_and_never_run_opened_or_decoded(
    predict: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_it(*_: Any, **__: Any) -> None:
        raise AssertionError("Ghostscript is not to be called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run_it)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 300 // 2 - 1)
    Image.init()
    folder = photos.parent / "linked"
    folder.mkdir()
    (folder / "again").symlink_to(folder)
    (folder / "a.png").symlink_to(photos / "00.png")
    (folder / "gone.png").symlink_to(photos / "none.png")
    os.mkfifo(folder / "pipe.png")
    Image.new("1", (300, 300)).save(folder / "bomb.png")
    (folder / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    assert [row["path"] for row in predict("input=linked")] == ["linked/a.png"]
    listed = Path("rows_unreadable.txt").read_text()
    for reason in ("gone.png: no such file", "pipe.png: it is not a regular file", "bomb.png",
                   "script.png: its content is not an image of a known type"):  # fmt: skip
        assert f"linked/{reason}" in listed
    assert listed.count("\n") == 4


def test_the_middle_is_fitted_to_images_that_are_not_square() -> None:
    image = torch.arange(3 * 20 * 40, dtype=torch.float32).view(3, 20, 40)
    assert fitted(image, 20, 40) is image
    assert torch.equal(fitted(image, 20, 20), image[:, :, 10:30])
    assert fitted(image, 5, 10).shape == (3, 5, 10)


@pytest.fixture
def of_files(train: Any, workdir: Path) -> Path:
    """A run on image files in `set`, of which it takes the middle."""
    for split, name, seed in [(s, c, n) for s in ("train", "test") for c in "ab" for n in range(3)]:
        path = workdir / "set" / split / name / f"{seed}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    words = ("data=image_folder", "data.root=set", "data.image_size=8", "data.dataset.crop_share=0.5", "model=mlp")
    directory: Path = train(*words, "epochs=1", "data.num_workers=0", "transform=none", "data.split.val=0.4").directory
    return directory


def test_files_are_named_in_predictions_of_a_split_and_in_wrong_ones(of_files: Path, accepted: Any) -> None:
    accepted(*CALL, f"ckpt_path={of_files}", "input=test", "output=rows.csv")
    files = [row["path"] for row in cells()]
    assert files == sorted(str(path) for path in Path("set/test").glob("*/*"))
    accepted("inspect", "threads=1", f"ckpt_path={of_files}", "what=errors", "split=test", "hydra.run.dir=looked")
    wrong = json.loads(Path("looked/inspect.json").read_text())["errors"]["surest"]
    assert {each["file"] for each in wrong} == {row["path"] for row in cells() if row["prediction"] != row["target"]}
    assert wrong


def test_a_split_that_the_data_do_not_have_is_refused(rejected: Any, of_files: Path) -> None:
    for path in sorted(Path("set/test").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    Path("set/test").rmdir()
    said = rejected(*CALL, f"ckpt_path={of_files}", "input=test", "data.split.test=0").err
    assert "input: this data has no 'test' split\n    allowed: train, val" in said


def test_the_crop_of_the_checkpoint_is_that_of_the_prediction(of_files: Path, predict: Any) -> None:
    def logits(word: str) -> torch.Tensor:
        rows = predict(f"ckpt_path={of_files}", "logits=true", "data.num_workers=0", word)
        return torch.tensor([row["logits"] for row in rows])

    by_split = logits("input=test")
    shutil.move("set", "elsewhere")
    torch.testing.assert_close(logits("input=elsewhere/test"), by_split, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_predicts_without_its_data(
    accepted: Any, trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained / "checkpoints" / "last.safetensors"
    assert read(path)["metrics"]["images"] == [3, 8, 8]

    def absent(*_: Any, **__: Any) -> None:
        raise AssertionError("the data is not to be read")

    monkeypatch.setattr("runner.run.from_checkpoint.read_data", absent)
    accepted(*CALL, f"ckpt_path={path}", "input=photos/00.png", "output=rows.csv")


def test_csv_cells_are_no_formulas_and_names_are_clean(
    accepted: Any, trained: Path, photos: Path, workdir: Path
) -> None:
    for name in ("=cmd.png", "new\nline.png", "a\r=cmd.png", "bell\a\x1b[31m.png"):
        shutil.copy(photos / "00.png", workdir / name)
    (workdir / os.fsdecode(b"latin\xe9.png")).write_bytes(b"broken")
    result = accepted(*CALL, f"ckpt_path={trained}", 'input="*.png"', "output=rows.csv")
    assert "\a" not in result.out
    assert "\x1b" not in result.out
    rows = [row["path"] for row in cells()]
    assert rows == ["'=cmd.png", "a\r=cmd.png", "bell\a\x1b[31m.png", "new\nline.png"]
    lines = Path("rows.csv").read_bytes().split(b"\r\n")
    assert len(lines) == 1 + len(rows) + 1, "lines end with CR LF"
    assert lines[2].startswith(b'"a\r=cmd.png",'), "a bare CR is inside quotes"
    assert "latin\\udce9.png" in Path("rows_unreadable.txt").read_text()


def test_the_likeliest_classes_come_first_and_probabilities_add_up(predict: Any, photos: Path) -> None:
    (row,) = predict("input=photos/00.png", "top_k=3", "probabilities=true", "logits=true")
    torch.testing.assert_close(torch.tensor(row["logits"]).softmax(0), torch.tensor(row["probabilities"]))
    best = sorted(row["probabilities"], reverse=True)[:3]
    assert [row["probability"], row["probability_2"], row["probability_3"]] == pytest.approx(best)
    assert row["prediction"] == str(row["probabilities"].index(best[0]))
    assert sum(row["probabilities"]) == pytest.approx(1)


def test_both_formats_hold_the_same_rows(predict: Any, photos: Path) -> None:
    words = ("input=photos", "probabilities=true", "evaluate.batch_size=10")
    rows = predict(*words)
    predict(*words, "output=rows.csv")
    for line, row in zip(cells(), rows, strict=True):
        assert line["prediction"] == row["prediction"]
        assert [float(line[f"probabilities:{n}"]) for n in range(4)] == row["probabilities"]


def test_numbers_are_predicted_as_they_were_learned(train: Any, predict: Any, json_of: Any, rejected: Any) -> None:
    directory = train(*SMALL, "data.dataset.kind=regression", "task=regression", "loss=mse").directory
    rows = predict(f"ckpt_path={directory}", "input=test")
    error = sum(abs(row["prediction"] - row["target"]) for row in rows) / len(rows)
    found = json_of("eval", "threads=1", f"ckpt_path={directory}")
    assert error == pytest.approx(found["metrics"]["mae"], rel=1e-5)
    refused = rejected(*CALL, f"ckpt_path={directory}", "input=test", "probabilities=true")
    assert "probabilities: this model was trained for numbers" in refused.err


def test_features_of_a_layer_are_in_the_order_of_the_rows_and_lead_to_the_logits(
    predict: Any, photos: Path, trained: Path
) -> None:
    (photos / "03.png").write_bytes(b"not an image")
    rows = predict("input=photos", "logits=true", "features=stages.2,dropout", "evaluate.batch_size=4")
    with np.load("rows_features.npz") as arrays:
        features = {name: torch.from_numpy(arrays[name]) for name in arrays}
    assert features["stages.2"].shape[:2] == (14, 16)
    torch.testing.assert_close(features["stages.2"].amax(dim=(2, 3)), features["dropout"])
    weights = read(trained / "checkpoints" / "best.safetensors")["model"]
    logits = features["dropout"] @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(logits, torch.tensor([row["logits"] for row in rows]), rtol=1e-4, atol=1e-5)


class Turned(torch.nn.Module):
    """A model with a layer that gives tokens first, and one that gives a number for the whole batch."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.tokens, self.whole, self.head = torch.nn.Identity(), torch.nn.Identity(), torch.nn.LazyLinear(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits."""
        tokens = self.tokens(images.flatten(2).permute(2, 0, 1))
        return self.head(tokens.mean(0)) + 0 * self.whole(tokens.mean())


@pytest.mark.parametrize("size", [64, 5])
@pytest.mark.parametrize("layer", ["tokens", "whole"])
def test_features_that_are_not_by_image_are_refused_even_if_as_many_as_the_batch(layer: str, size: int) -> None:
    layers = Extractor(Turned(4, 3), ["head", layer]).rows
    with pytest.raises(UserError, match=f"features: '{layer}' gives .* not one row per image"):
        layers(torch.rand(size, 3, 8, 8))
    assert Extractor(Turned(4, 3), ["head"]).rows(torch.rand(size, 3, 8, 8))["head"].shape == (size, 4)


def test_a_failure_before_the_first_image_ends_the_workers_of_a_split(
    rejected: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    close = DataModule.close
    monkeypatch.setattr(DataModule, "close", lambda self: (closed.append(self), close(self)))
    rejected(*CALL, f"ckpt_path={trained}", "input=test", "model.width=8")
    assert len(closed) == 1


def test_views_are_tried_on_what_the_model_is_given(
    rejected: Any, trained: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The data is square, and after transform.eval the images are not.
    monkeypatch.setattr("runner.run.from_checkpoint.callables", lambda *_: [lambda images, rng: images[..., :6]])
    result = rejected(*CALL, f"ckpt_path={trained}", "input=photos", "tta=rotations")
    assert "tta: rotations require square images, and these have 8x6 pixels" in result.err


def test_the_view_of_a_prediction_is_averaged(predict: Any, photos: Path) -> None:
    plain = predict("input=photos/00.png", "logits=true")[0]["logits"]
    image = read_image(photos / "00.png", None, 3)
    save(photos / "mirrored.png", image.flip(-1))
    mirrored = predict("input=photos/mirrored.png", "logits=true")[0]["logits"]
    both = predict("input=photos/00.png", "logits=true", "tta=flip")[0]["logits"]
    mean = (torch.tensor(plain) + torch.tensor(mirrored)) / 2
    torch.testing.assert_close(torch.tensor(both), mean, rtol=1e-5, atol=1e-6)


def test_without_an_output_a_new_folder_is_made_and_programs_get_one_object(
    json_of: Any, trained: Path, photos: Path
) -> None:
    found = json_of(*CALL, f"ckpt_path={trained}", "input=photos")
    assert found["predicted"] == 15
    assert found["unreadable"] == []
    assert found["images_per_s"] > 0
    assert Path(found["output"]).parent.parent == Path("outputs/predictions")
    assert Path(found["output"]).read_text().count("\n") == 16
