"""Pictures show the stored rows."""

import pytest

from helpers.results import plots, store
from helpers.results.store import CARDS, Row

NEW = [Row("protocol", "100 rounds", name, "s", [value]) for name, value in (("ours", 0.04), ("peft", 0.1))]
LABELS = {  # from the bottom up
    "protocol": ["0.1000 s", "0.0400 s"],
    "speed_by_size": [f"specified: {CARDS[plots.CARD].bandwidth} TB/s"],
}


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows_in_its_frame(name):
    figure = plots.PICTURES[name](store.select(store.rows(plots.CARD), "gpu_time") + NEW)
    assert plots.png(figure).startswith(b"\x89PNG")
    figure.dpi = 200  # as in the file
    panel = figure.axes[0]
    assert [text.get_text() for text in panel.texts] == LABELS[name]
    assert all(text.get_window_extent().x1 < panel.bbox.x1 for text in panel.texts)
