"""Pictures: small enough for a text cell, and showing the stored numbers."""

import pytest
from PIL import Image

from helpers.results import plots, store


@pytest.mark.parametrize(
    "name, says",
    [
        ("idea", "rounded to fp32, then to 16 bits"),
        ("where_time_goes", "this kernel: 20.0 + 24.4 = 44.4; Unsloth today: 21.0 + 25.7 = 46.7"),
        ("share_by_size", "this kernel: 0.95 to 0.95; Unsloth today: 0.90 to 0.90"),
        ("t4", "over Unsloth today: 1.09 to 1.23, 10 to 14 of 14 points"),
        ("training", "PEFT, 512 tokens: 1.45 (0.90 to 2.00)"),
    ],
)
def test_every_picture_is_small_and_says_its_numbers(stored, name, says):
    figure, alt = plots.PICTURES[name]()
    assert says in alt and "\n" not in alt
    file = stored / "a.png"
    plots.save(figure, file)
    image = Image.open(file)
    assert file.stat().st_size <= 45_000 and image.width == 900
    assert len(image.getcolors()) >= 5, "more than an empty sheet"


@pytest.mark.parametrize("name", ["where_time_goes", "share_by_size", "t4", "training"])
def test_without_rows_there_is_no_picture(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    with pytest.raises(store.Missing):
        plots.PICTURES[name]()
