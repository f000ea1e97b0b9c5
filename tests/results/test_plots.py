"""Pictures show the stored rows."""

import pytest

from helpers.results import plots
from helpers.results.store import CARDS, one


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows(stored, name):
    figure = plots.PICTURES[name](stored)
    assert plots.png(figure).startswith(b"\x89PNG")
    shown = [text.get_text() for text in figure.axes[0].texts]
    seconds = one(stored[plots.CARD], "protocol", "total", "bitsandbytes").median
    labels = {"protocol": f"{seconds:.3f} s", "where_time_goes": f"{seconds / 9e-3:.1f} us"}
    assert labels.get(name, f"specified: {CARDS[plots.CARD].bandwidth} TB/s") in shown
