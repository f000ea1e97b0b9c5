"""Pictures: small enough for a text cell, readable, drawn from the stored rows."""

import pytest
from PIL import Image

from helpers.results import pages, plots


@pytest.mark.parametrize(
    "name, says",
    [
        ("idea", "the word 855A8A74 holds codes 72 to 79, all of block 1"),
        ("protocol", "Unsloth today: 0.420 s, 1.05 times as long; this kernel: 0.400 s"),
        ("where_time_goes", "Unsloth today: 21.0 + 25.7 = 46.7; this kernel: 20.0 + 24.4 = 44.4"),
        ("speed_by_size", "this kernel: 0.52 to 7.38 TB/s; Unsloth today: 0.50 to 7.03 TB/s"),
        ("t4", "over Unsloth today: 1.09 to 1.23, 10 to 14 of 14 points"),
    ],
)
def test_every_picture_is_small_and_says_its_numbers(stored, name, says):
    figure, alt = plots.PICTURES[name]()
    assert says in alt and "\n" not in alt
    file = stored / "a.png"
    plots.save(figure, alt, file)
    image = Image.open(file)
    assert file.stat().st_size <= 45_000 and image.width == 900
    assert len(image.getcolors()) >= 5, "more than an empty sheet"


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_stored_picture_is_drawn_from_the_stored_rows(name):
    image = Image.open(pages.FIGURES / f"{name}.png")
    assert image.text["inputs"] == plots.digest(*plots.PICTURES[name]()), "run `python -m helpers draw`"


def test_another_bar_line_or_word_is_another_input(stored):
    figure, alt = plots.protocol()
    digests = {plots.digest(figure, alt), plots.digest(figure, f"{alt} More.")}
    panel = figure.axes[0]
    panel.patches[0].set_width(9)
    digests.add(plots.digest(figure, alt))
    panel.plot([1, 2])
    assert len(digests | {plots.digest(figure, alt)}) == 4
