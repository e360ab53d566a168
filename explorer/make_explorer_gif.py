"""Record explorer.gif: explorer.html in use, in a headless browser.

    python -m explorer.make_explorer_gif --page explorer.html --out explorer.gif

Needs Chromium, its driver and selenium (``pip install selenium``). A seven and a zero are drawn with the mouse, the
routing goes from one to five iterations, numbers of a capsule are moved, and an object is rotated to a view from
outside the training range.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explorer.browser import headless_browser, show_as
from smallnorb_novel_viewpoint import INPUT, OUTPUT, Settings, UserError, float_in, parse, script, setting
from support.experiment import require_writable
from support.figures import gif_bytes, write_if_changed

Array = np.ndarray
Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 960, 800  # pixels: every part that is shown fits in
PREVIEW = 1200, 630
SEVEN = [(0.3, 0.25), (0.7, 0.25), (0.45, 0.8)]
ZERO = [(0.5 + 0.2 * math.sin(0.5 * t), 0.5 - 0.27 * math.cos(0.5 * t)) for t in range(14)]
START_SECONDS = 60


def open_page(driver: Any, page: Path) -> None:
    driver.get(page.resolve().as_uri())
    deadline = time.monotonic() + START_SECONDS
    while driver.execute_script("return document.documentElement.dataset.ready") != "true":
        if time.monotonic() > deadline:
            raise UserError(f"{page} does not begin: is it a page of make_explorer.py?")
        time.sleep(0.05)


def draw_line(driver: Any, canvas_id: str, points: Points) -> None:
    """Draw with the mouse; points in [0, 1]^2, from the upper left corner of the canvas."""
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = driver.find_element("id", canvas_id)
    driver.execute_script("arguments[0].scrollIntoView({ block: 'nearest', behavior: 'instant' })", canvas)
    side = canvas.size["width"]
    pen = ActionChains(driver, duration=10)

    def move(x: float, y: float) -> None:
        pen.move_to_element_with_offset(canvas, round((x - 0.5) * side), round((y - 0.5) * side))

    move(*points[0])
    pen.click_and_hold()
    for start, stop in itertools.pairwise(points):
        for part in np.linspace(0, 1, 7)[1:]:
            move(*(a + (b - a) * part for a, b in zip(start, stop, strict=True)))
    pen.release().perform()


def record(driver: Any, strokes: int = 100, steps: int = 12) -> list[Array]:
    """Frames (HEIGHT, WIDTH, 3) of an open page; ``strokes``: of each digit at most; ``steps``: of each movement."""
    frames: list[Array] = []
    show_as(driver, WIDTH, HEIGHT)

    def show(selector: str) -> None:
        """Scroll there, and hide what the lower edge would cut through, with its heading."""
        driver.execute_script(
            """const all = [...document.querySelectorAll('section :is(p, li, label, summary, canvas, svg, h2, h3)')];
            all.forEach((e) => { e.style.visibility = '' });
            const box = document.querySelector(arguments[0]).getBoundingClientRect();
            scrollTo({ top: box.top + scrollY - 12, behavior: 'instant' });
            const isCut = (e) => {
                const { top, bottom } = e.getBoundingClientRect();
                return top < innerHeight && bottom > innerHeight;
            };
            for (const e of all.filter(isCut)) {
                const before = e.previousElementSibling;
                e.style.visibility = 'hidden';
                if (before && /^H[23]$/.test(before.tagName)) before.style.visibility = 'hidden';
            }""", selector,
        )

    def shoot(n: int = 1) -> None:
        """The page after two frames of the screen, ``n`` times."""
        driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")
        with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as image:
            frames.extend([np.asarray(image.convert("RGB"))] * n)

    def set_value(name: str, value: float) -> None:
        driver.execute_script(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input'))", name, value,
        )

    show("body")
    driver.execute_script("document.getElementById('clear').click()")
    for layer, points in enumerate((SEVEN, ZERO)):
        driver.execute_script("document.querySelectorAll('input[name=layer]')[arguments[0]].click()", layer)
        for k in range(min(strokes, len(points) - 1)):
            draw_line(driver, "draw", points[k : k + 2])
            shoot(1 + (len(points) < 5))
    shoot(6)
    frames.insert(0, frames[-1])  # where the animation does not play, the whole drawing is seen
    show("#routing .columns")
    for t in (1, 2, 3, 4, 5, 3)[: steps + 1]:
        set_value("iterations", t)
        shoot(2)
    show("#dimensions .columns")
    for slider in driver.find_elements("css selector", "#sliders input")[:2]:
        for k in range(steps + 1):
            set_value(slider.get_attribute("id"), 0.25 * math.sin(2 * math.pi * k / steps))
            shoot()
    show("#viewpoint .columns")
    azimuth = int(driver.execute_script("return explorer.view.azimuth"))
    for held_out in range(330, 199, -10):  # the animation ends on a view that the capsules classify correctly
        set_value("azimuth", held_out)
        if "capsules are right" in driver.find_element("id", "verdict").text:
            azimuth = held_out
            break
    for k in range(2 * steps + 1):
        set_value("azimuth", round(azimuth * k / (2 * steps)))
        shoot()
    shoot(6)
    return frames


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    page: Path = setting(Path("explorer.html"), INPUT, "The page that make_explorer.py has written.", usual=True)
    fps: float = setting(6.0, float_in(0.1, 50), "Show X frames a second.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    out: Path = setting(Path("explorer.gif"), OUTPUT, "File of the animation, a GIF.", usual=True)
    preview: Path | None = setting(None, OUTPUT, "Also write the image that a link to the page shows, a PNG.")


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Record explorer.html in use as a GIF, in a headless Chromium, with selenium.",
        ("", "Record explorer.html as explorer.gif: about 30 seconds."),
        ("--page draft.html --out draft.gif", "Record another page: about 30 seconds."),
    )
    require_writable(options.out, *filter(None, [options.preview]))
    if not config.page.is_file():
        raise UserError(f"there is no page {config.page}: python -m explorer.make_explorer writes it")
    with headless_browser(WIDTH, HEIGHT) as driver:
        open_page(driver, config.page)
        frames = record(driver)
        show_as(driver, *PREVIEW)
        driver.execute_script("scrollTo(0, 0); explorer.showExample(0)")
        driver.execute_async_script("setTimeout(arguments[0], 1000)")
        preview = driver.get_screenshot_as_png()
    print(write_if_changed(options.out, gif_bytes(frames, config.fps), overwrite=True))
    if options.preview:
        print(write_if_changed(options.preview, preview, overwrite=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
