"""The page of a report: its size, and what a person does with it in a real browser."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runner

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
MOST_BYTES = 5 * 2**20


@pytest.fixture
def page_file(many: Callable[[int], Path], tmp_path: Path) -> Path:
    """The page of 200 runs, of which one has a confusion matrix and a picture."""
    root = many(200)
    counts = {"split": "val", "per_class": {"a": 0.9, "b": 1.0}, "confusion": [[9, 1], [0, 10]]}
    (root / "40" / "eval_val.json").write_text(json.dumps(counts))
    from PIL import Image

    picture = root / "40" / "inspect" / "now" / "errors.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 10), "red").save(picture)
    path = tmp_path / "report.html"
    began = time.process_time()
    runner.report(root, html=path)
    assert time.process_time() - began < 10
    return path


def test_the_page_is_one_small_file_that_needs_no_network(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert not re.findall(r"(?:src|href)=[\"']?(?!data:)\w+:", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    [content] = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(content["runs"]) == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api as playwright

    if CHROMIUM is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)


def ink(page: Any) -> int:
    """Pixels of the learning curves that are not empty."""
    script = """() => { const c = document.getElementById("curves");
      return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v > 0).length }"""
    return int(page.evaluate(script))


def said_by(page: Any) -> list[str]:
    """What the page writes to the console, and the errors of its script, as they come."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return said


FILTER = """(text) => { const field = document.getElementById("filter"); field.value = text;
  const began = performance.now(); field.dispatchEvent(new Event("input")); document.body.getBoundingClientRect();
  return performance.now() - began }"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_person_can_use_the_page(page_file: Path, browser: Any) -> None:
    for scheme, width in (("light", 1280), ("dark", 390)):
        page = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
        said = said_by(page)
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        assert page.locator("#table tbody tr").count() == 24
        assert page.locator("#parallel path").count() == 192
        assert page.locator("#slices circle").count() == 3 * 192
        assert page.locator("#confusions td", has_text="9").count() == 1
        assert page.locator("#pictures img").evaluate("each => each.naturalWidth") == 20
        assert page.locator("#failed pre").count() == 8
        boxes = (
            "texts => texts.map((text) => text.getBoundingClientRect()).map((box) => [box.left, box.right, box.height])"
        )
        assert min(height for *_, height in page.eval_on_selector_all("svg text", boxes)) > 11  # pixels
        axes = page.eval_on_selector_all("#parallel text:not(.value)", boxes)
        assert len(axes) == 4
        assert all(right < left for (_, right, _), (left, *_) in itertools.pairwise(axes))
        assert page.locator("#lineage li").count() >= 4

        # A filter answers at once, everywhere
        times = {
            text: page.evaluate(FILTER, text) for text in ("64", "amp=true and val/accuracy>0.9", "optimizer.lr=0.01")
        }
        times["again"] = page.evaluate(FILTER, "optimizer.lr=0.01")
        assert sorted(times.values())[1] < 100, times
        assert page.locator("#count").inner_text() == "50 of 200 runs"
        assert page.locator("#table tbody tr").count() == 6
        assert page.locator("#parallel path:not(.off)").count() < 60
        page.fill("#filter", "nothing>3")
        assert page.get_attribute("#filter", "aria-invalid") == "true"
        assert "nothing" in page.locator("#count").inner_text()
        page.fill("#filter", "")
        assert page.get_attribute("#filter", "aria-invalid") is None
        assert page.locator("#count").inner_text() == "200 of 200 runs"

        # Another curve, zoom and hover, with the mouse and with keys
        page.select_option("#curve", "train/loss")
        before = ink(page)
        assert before > 1000
        canvas = page.locator("#curves")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.8)
        assert "train/loss" in page.locator("#tip").inner_text()
        assert "±" in page.locator("#tip").inner_text()
        page.mouse.move(box["x"] + 80, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 50)
        page.mouse.up()
        assert page.evaluate("zoom !== null && zoom[1] - zoom[0] < 500")
        page.click("#reset")
        assert page.evaluate("zoom") is None
        canvas.focus()
        for key in ("+", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert page.evaluate("zoom !== null && picked !== null && cursor !== null")
        assert "step" in page.locator("#tip").inner_text()
        page.keyboard.press("0")
        page.check("#each")
        assert page.evaluate("lines.length") > 150
        page.focus("#table th button >> nth=1")
        page.keyboard.press("Enter")
        assert page.locator("#table th").nth(1).get_attribute("aria-sort") == "ascending"
        assert said == []


@pytest.mark.parametrize("which", ["one run", "no metric", "text keys"])
def test_a_page_of_few_runs_has_no_empty_promises(which: str, many: Any, tmp_path: Path, browser: Any) -> None:
    folder = tmp_path / "runs"
    numbers = {"one run": [0], "no metric": [39], "text keys": [0, 5]}[which]
    for number in numbers:
        shutil.copytree(many(40) / str(number), folder / str(number))
        if which == "text keys":
            (folder / str(number) / "overrides.yaml").write_text(f"- experiment=number{number}\n")
    path = tmp_path / "report.html"
    runner.report(folder, html=path)
    page = browser.new_page()
    said = said_by(page)
    page.goto(path.as_uri())
    assert said == []
    assert page.locator("#table tbody tr").count() == len(numbers)
    assert page.locator("#failed-section").is_visible() == (which == "no metric")
