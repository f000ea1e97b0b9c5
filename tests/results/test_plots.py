"""Pictures show the stored rows."""

import pytest

from helpers.results import plots, store
from helpers.results.store import Row

NEW = [Row("protocol", "100 rounds", name, "s", [value]) for name, value in (("ours", 0.04), ("peft", 0.1))]
LABELS = {  # from the bottom up
    "protocol": ["0.1000 s", "0.0400 s"],
    "speed_by_size": ["specified: 4.8 TB/s"],
}


def test_the_traffic_is_what_the_format_reads_and_writes():
    """16,384 elements in 1 us: 8,192 bytes of codes, 256 of absmax, 4 of absmax2, and 32,768 of bf16."""
    figure = plots.speed_by_size([Row("gpu_time", "16384 bf16", "ours", "us", [1.0])])
    [line] = [line for line in figure.axes[0].lines if line.get_label() == "this kernel"]
    assert line.get_ydata() == pytest.approx([0.041220])


@pytest.mark.parametrize("name", plots.PICTURES)
def test_every_picture_shows_the_rows_in_its_frame(name):
    figure = plots.PICTURES[name](store.select(store.rows(plots.CARD), "gpu_time") + NEW)
    assert plots.png(figure).startswith(b"\x89PNG")
    figure.dpi = 200  # as in the file
    panel = figure.axes[0]
    assert [text.get_text() for text in panel.texts] == LABELS[name]
    assert all(text.get_window_extent().x1 < panel.bbox.x1 for text in panel.texts)
