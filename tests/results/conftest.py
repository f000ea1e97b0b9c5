"""Rows that every block and picture can be made from."""

import pytest

from helpers.results import pages, plots, store
from helpers.results.store import Row

TIMES = {
    "ours": 20,
    "unsloth_today": 21,
    "unsloth_classic": 40,
    "bitsandbytes": 40,
    "peft": 50,
    "unsloth_buffered": 20,
    "copy_kernel": 19,
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A folder that holds results/ with a few rows of an H200 and of a simulated T4."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(pages, "FIGURES", tmp_path)
    rows = [
        Row("protocol", "puzzle's line", "unsloth_today", "x", (1.579, 1.5, 1.6)),
        Row("protocol", "puzzle's line", "unsloth_classic", "x", (2, 1.9, 2.1)),
        Row("protocol", "total", "ordinary", "s", [0.5]),
        Row("host_time", "until_return", "ours", "us", [13.9]),
        Row("host_time", "until_return", "unsloth_buffered", "us", [18]),
        Row("score", "One fused kernel", "today", "points", [3]),
        Row("training", "PEFT, 512 tokens", "without", "ms", (20, 45)),
        Row("training", "PEFT, 512 tokens", "with", "ms", (10, 50)),
        Row("soak", "launches", "ours", "count", [7]),
    ]
    for who, us in TIMES.items():
        rows.append(Row("protocol", "total", who, "s", [0.02 * us]))
        for numel in (4194304, 16777216, 58720256):
            rows.append(Row("gpu_time", f"{numel} fp16", who, "us", [us]))
            rows.append(Row("gpu_time", f"{numel} bf16", who, "us", [us]))
    facts = {"card": "NVIDIA H200", "driver": "580", "cuda": "13.0", "versions": {"torch": "2.11"}}
    stamp = {"date": "2026-11-23", "note": "", "commit": None, **store.hashes(), **facts}
    sections = {row.section: dict(stamp) for row in rows}
    store.save(plots.CARD, rows, facts | {"sections": sections})
    rows = []
    for who in ("unsloth_today", "unsloth_classic"):
        rows.append(Row("t4_prediction", "speedup", who, "x", (1.0968, 1.2376)))
        rows.append(Row("t4_prediction", "points", who, "points", (10, 14)))
    store.save(plots.T4, rows, {})
    return tmp_path
