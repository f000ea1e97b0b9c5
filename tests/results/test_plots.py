"""Pictures show the stored rows."""

import pytest

from helpers.results import plots
from helpers.results.store import one


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows(stored, name):
    figure = plots.PICTURES[name](stored)
    assert plots.png(figure).startswith(b"\x89PNG")
    seconds = one(stored[plots.CARD], "protocol", "total", "bitsandbytes").median
    labels = {"protocol": f"{seconds:.3f} s", "where_time_goes": f"{seconds / 9e-3:.1f} us"}
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert labels.get(name, f"specified: {plots.BANDWIDTH} TB/s") in shown
