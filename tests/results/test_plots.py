"""Pictures: of the rows, in the contenders' colors, with a text that says their numbers."""

import io

import pytest
from PIL import Image

from helpers.results import plots
from helpers.results.store import one


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_is_drawn_and_says_its_numbers(stored, name):
    figure, alt = plots.PICTURES[name](stored)
    image = Image.open(io.BytesIO(plots.png(figure))).convert("RGB")
    shown = {color for _, color in image.getcolors(10**6)}
    assert image.width == 900
    assert all(tuple(bytes.fromhex(plots.COLORS[who][1:])) in shown for who in ("ours", "unsloth_today"))
    ours = one(stored[plots.H200], "protocol", "total", "ours").median
    numbers = {
        "protocol": f"{ours:.3f}.",
        "where_time_goes": f" = {ours / 9e-3:.1f}.",
        "speed_by_size": " 4.8 ",
    }
    assert numbers[name] in alt
