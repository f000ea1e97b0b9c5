"""Pictures: small enough for a text cell, and showing the stored numbers."""

import pytest
from PIL import Image

from helpers.results import plots, store
from helpers.results.store import Row


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Rows that every picture can be drawn from."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    rows = []
    times = {"ours": 20, "unsloth_today": 21, "unsloth_classic": 40, "bitsandbytes": 40, "copy_kernel": 19}
    for who, us in times.items():
        rows.append(Row("protocol", "total", who, "s", [0.02 * us]))
        for size in plots.SHAPES:
            numel = size.split()[0]
            rows += [Row("gpu_time", f"{numel} {dtype}", who, "us", [us]) for dtype in ("fp16", "bf16")]
    rows.append(Row("training", "PEFT, 512 tokens", "without", "ms", (20, 45)))
    rows.append(Row("training", "PEFT, 512 tokens", "with", "ms", (10, 50)))
    store.save(plots.CARD, rows, {})
    rows = []
    for who in ("unsloth_today", "unsloth_classic"):
        rows.append(Row("t4_prediction", "speedup", who, "x", (1.0968, 1.2376)))
        rows.append(Row("t4_prediction", "points", who, "points", (10, 14)))
    store.save(plots.T4, rows, {})


@pytest.mark.parametrize(
    "name, says",
    [
        ("idea", "rounded to fp32, then to 16 bits"),
        ("where_time_goes", "this kernel: 20.0 + 24.4 = 44.4; Unsloth today: 21.0 + 25.7 = 46.7"),
        ("share_by_size", "this kernel: 0.95 to 0.95; Unsloth today: 0.90 to 0.90"),
        ("t4", "over Unsloth today: 1.09 to 1.23, at least 10 of 14 points"),
        ("training", "PEFT, 512 tokens: 1.45 (0.90 to 2.00)"),
    ],
)
def test_every_picture_is_small_and_says_its_numbers(stored, tmp_path, name, says):
    figure, alt = plots.PICTURES[name]()
    assert says in alt and "\n" not in alt
    plots.save(figure, tmp_path / "a.png")
    image = Image.open(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size <= 45_000 and image.width == 900
    assert len(image.getcolors()) >= 5, "more than an empty sheet"


@pytest.mark.parametrize("name", ["where_time_goes", "share_by_size", "t4", "training"])
def test_without_rows_there_is_no_picture(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    with pytest.raises(store.Missing):
        plots.PICTURES[name]()


@pytest.mark.parametrize("ratio, text", [(1.0968, "1.09"), (1.15, "1.15"), (0.999, "0.99"), (2, "2.00")])
def test_ratios_are_rounded_down(ratio, text):
    assert plots.rounded_down(ratio) == text
