"""Pictures: of the rows, in the contenders' colors."""

import io

import pytest
from PIL import Image

from helpers.results import plots
from helpers.results.store import one


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows_in_the_contenders_colors(stored, name):
    figure = plots.PICTURES[name](stored)
    image = Image.open(io.BytesIO(plots.png(figure))).convert("RGB")
    colors = {color for _, color in image.getcolors(10**6)}
    assert image.width == 900
    assert all(tuple(bytes.fromhex(plots.COLORS[who][1:])) in colors for who in ("ours", "unsloth_today"))
    seconds = one(stored[plots.H200], "protocol", "total", "bitsandbytes").median
    labels = {"protocol": f"{seconds:.3f} s", "where_time_goes": f"{seconds / 9e-3:.1f} us"}
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert labels.get(name, "specified: 4.8 TB/s") in shown
