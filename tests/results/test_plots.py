"""Pictures: small enough for a text cell, and showing the stored numbers."""

import io
import re

import pytest
import torch
from PIL import Image

from helpers.nf4 import reference
from helpers.results import pages, plots, store
from helpers.results.store import Row, one


@pytest.mark.parametrize("name", [function.__name__ for function in pages.PICTURES])
def test_every_picture_is_small_and_described(name):
    picture = getattr(plots, name)()
    image = Image.open(io.BytesIO(png := picture.png()))
    assert len(png) <= 45_000 and image.format == "PNG" and image.width >= 700
    assert len(image.convert("RGB").getcolors()) >= 5, "more than an empty sheet"
    assert re.search(r"\d\.\d", picture.alt) and "\n" not in picture.alt


def test_pictures_show_the_stored_numbers():
    rows = store.rows(plots.CARD)
    on_gpu, rest = plots.call_us(rows, "ours")
    assert f"this kernel: {on_gpu:.1f} + {rest:.1f}" in plots.where_time_goes().alt
    assert on_gpu + rest == pytest.approx(1e6 / 9000 * one(rows, "protocol", "total", "ours").median)
    row = one(store.rows(plots.T4), "t4_prediction", "total", "unsloth_today")
    assert f"Unsloth today: {row.low:.1f} to {row.high:.1f} s" in plots.t4().alt


def test_the_idea_shows_what_the_reference_computes():
    shown = plots.numbers()
    layer = reference.quantized_layer(128, 2, torch.float16, device="cpu")
    weight = reference.dequantize(layer.weight, layer.weight.quant_state).flatten().tolist()
    assert shown["stored"] == weight[:8]
    assert set(weight[64:128]) <= set(shown["table"][1])


def test_speedups_are_taken_round_by_round():
    rows = [Row("training", "x", name, "ms", ms) for name, ms in (("without", (2, 4)), ("with", (1, 4)))]
    assert plots.speedups(rows, "training", "x") == [2, 1]


@pytest.mark.parametrize("numel, text", [(65536, "64K"), (2**20, "1M"), (58720256, "58.7M"), (2**30, "1G")])
def test_sizes_are_readable(numel, text):
    assert plots.size_text(numel) == text
