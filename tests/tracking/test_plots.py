import json
import math
import subprocess
import sys

import numpy as np
import pytest
from extended import some
from PIL import Image

from runner.tracking.plots import Tile, confusion_matrix, fit, image_grid, learning_curves


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr("runner.tracking.plots._DPI", 40)


def _image(path):
    with Image.open(path) as image:
        return image.convert("L")


def _border_is_white(path):
    pixels = np.asarray(_image(path))
    return all((edge == 255).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]))


def _write_metrics(path, steps):
    lines = []
    for step in range(1, steps + 1):
        at = {"global_step": step, "epoch": 1}
        lines.append({**at, "split": "train", "loss": math.exp(-step / 10), "lr": 1e-3 / step})
        if step % 5 == 0:
            lines.append({**at, "split": "val", "loss": None if step == 10 else 1.0 / step, "f$1": 0.5})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"global_step": 3')


@pytest.mark.parametrize("steps", some([None, 0, 1, 20, 300], 0, 1, 2, 4))
def test_learning_curves_are_drawn_whole_for_any_length(tmp_path, steps):
    if steps is not None:
        _write_metrics(tmp_path / "metrics.jsonl", steps)
    learning_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert _border_is_white(tmp_path / "curves.png")
    assert _image(tmp_path / "curves.png").getextrema()[0] < 128


def test_the_curves_name_splits_and_metrics_with_units_and_leave_out_what_is_about_the_machine(tmp_path):
    _write_metrics(tmp_path / "metrics.jsonl", 20)
    machine = {"data_wait": 0.1, "peak_memory_mib": 7, "mfu": 0.2}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"global_step": 21, "epoch": 1, "split": "train", "loss": 1.0, **machine}) + "\n")
    learning_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    shown = {
        word: f"<!-- {word} -->" in text for word in ("train", "val", "loss", "learning rate", "optimizer step", "f$1")
    }
    assert all(shown.values()), shown
    assert not any(f"<!-- {word} -->" in text for word in ("data wait", "peak memory (MiB)", "mfu"))


ODD = ["a name much longer than anyone would want to read", "$x_犬", ""]


@pytest.mark.parametrize(
    "names", some([ODD, *([f"class {i}" for i in range(count)] for count in (1, 2, 10, 26, 100, 130))], 0, 2, 4)
)
def test_a_confusion_matrix_is_drawn_whole_for_any_classes_and_a_long_title(tmp_path, names):
    rows = range(len(names))
    matrix = [[0 if i == 1 and names is ODD else 1_234_567 if i == j else (i + j) % 3 for j in rows] for i in rows]
    confusion_matrix(matrix, names, tmp_path / "cm.png", "words and " * 30)
    assert _border_is_white(tmp_path / "cm.png")
    assert max(_image(tmp_path / "cm.png").size) < 3000


@pytest.mark.extended
def test_numbers_appear_only_while_they_fit(tmp_path):
    for count, expected in ((25, True), (26, False)):
        confusion_matrix([[777] * count] * count, [], tmp_path / "cm.svg", "val")
        assert ("<!-- 777 -->" in (tmp_path / "cm.svg").read_text()) is expected


def test_drawing_needs_no_display_and_leaves_the_backend_alone(tmp_path):
    code = """
import sys, pathlib
from runner.tracking.plots import confusion_matrix
confusion_matrix([[1, 0], [0, 1]], [], pathlib.Path("cm.png"), "val")
assert not {"matplotlib.pyplot", "tkinter"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "cm.png").stat().st_size > 1000


@pytest.mark.extended
def test_numbers_and_names_without_bounds_give_a_picture_with_bounds(tmp_path):
    lines = [json.dumps({"global_step": 1, "split": "train", f"metric_{number}": 10**400}) for number in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    learning_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    width, height = _image(tmp_path / "curves.png").size
    assert height < 4 * width


def _pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("count", some([1, 3, 17], 2))
@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3), (40, 10, 3)])
def test_images_of_any_number_and_shape_with_any_name(count, shape, tmp_path):
    names = ["a$b_c^", "名前 with a name that is much too long to fit", "\n"]
    image_grid([Tile(np.full(shape, 0.5), names)] * count, tmp_path / "grid.png", "title $x")
    grey = (np.abs(_pixels(tmp_path / "grid.png") - 128) < 3).all(axis=2)
    assert grey.mean() > 0.15, "the images are there"


def test_pixels_outside_their_range_are_cut_off_and_maps_that_are_not_finite_drawn_in_so_many_columns(tmp_path):
    target, sizes = tmp_path / "grid.png", []
    image_grid([Tile(np.full((4, 4, 3), 7.0), ["x"]), Tile(np.full((4, 4), -3.0), ["y"])], target, "t")
    assert (_pixels(target) == 0).all(axis=2).mean() > 0.1, "the second image is black"
    for columns in (2, 4):
        image_grid([Tile(np.full((4, 4), np.nan), ["x"])] * 8, target, "maps", columns)
        sizes.append(_pixels(target).shape)
    assert sizes[0][0] > sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_a_text_is_cut_at_its_end():
    assert [fit(text, 6) for text in ("abcdef", "abcdefg", "a  b\nc")] == ["abcdef", "abcde…", "a b c"]
