"""Pictures show the stored rows, this kernel first and alone in color."""

import pytest

from helpers.results import plots
from helpers.results.store import CARDS, Row, one


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows(stored, name):
    figure = plots.PICTURES[name](stored)
    assert plots.png(figure).startswith(b"\x89PNG")
    shown = [text.get_text() for text in figure.axes[0].texts]
    seconds = one(stored[plots.CARD], "protocol", "total", "bitsandbytes").median
    labels = {"protocol": f"{seconds:.3f} s", "where_time_goes": f"{seconds / 9e-3:.1f} us"}
    assert labels.get(name, f"specified: {CARDS[plots.CARD].bandwidth} TB/s") in shown


def test_this_kernel_is_the_first_bar_and_alone_in_color():
    turns = enumerate(("bitsandbytes", "ours", "peft"), 1)
    rows = [Row("protocol", "total", name, "s", [seconds]) for seconds, name in turns]
    panel = plots.protocol({plots.CARD: rows}).axes[0]
    shown = [label.get_text() for label in panel.get_yticklabels()]  # from the bottom
    other, another, own = [bar.get_facecolor() for bar in panel.patches]
    assert shown == ["PEFT", "bitsandbytes", "this kernel"] and other == another != own
