"""`python -m helpers soak` at a size for CI; a long run stores soak.json."""

import json

import pytest

from helpers import machine
from helpers.stress import soak


def test_flat_here(tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    launches = 200_000 if machine.has_gpu() else 40
    soak.main(["--launches", str(launches), "--windows", "8"])
    (path,) = tmp_path.rglob("soak.json")
    data = json.loads(path.read_text())["data"]
    assert data["launches"] == launches and data["wrong"] == 0 and len(data["windows"]) == 8
    assert not any("memory" in text for text in data["grown"]), "too short a run to judge time by"


@pytest.mark.parametrize(
    "windows, expected",
    [
        ([dict(us=5.0, host=100, allocated=7)] * 20, []),
        ([dict(us=5.0 + (i == 15), host=100, allocated=7) for i in range(20)], []),
        ([dict(us=5.0 + 0.1 * i, host=100, allocated=7) for i in range(20)], ["slower"]),
        ([dict(us=5.0, host=100 + i, allocated=7) for i in range(20)], ["host memory"]),
        ([dict(us=5.0, host=100, allocated=7 + i) for i in range(20)], ["GPU memory"]),
    ],
)
def test_growth_is_seen(windows, expected):
    windows = [
        {**window, "host": window["host"] * 2**20, "allocated": window["allocated"] * 2**20}
        for window in windows
    ]
    sentences = soak.growth(windows)
    assert len(sentences) == len(expected)
    assert all(word in text for word, text in zip(expected, sentences, strict=True))
