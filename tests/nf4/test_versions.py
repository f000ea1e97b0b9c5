"""The version matrix: the page shows what is stored, a missing row as not measured, a wrong bit as wrong."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("one_version.py")


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("one_version", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**changes):
    versions = {"python": "3.11.7", "torch": "2.13.0+cpu", "bitsandbytes": "0.50.2"}
    base = {"varied": "bitsandbytes", "versions": versions, "switched": ["a.dequantize_4bit"], "left": {}}
    base |= {"same_bits": True, "left_to_library": "0 of 64 dequantizations went through the library"}
    return base | {"problem": None, "refused": {}, "date": "2026-11-22", "device": "cpu"} | changes


def test_the_page_shows_what_is_stored(matrix):
    page = matrix.SHOWN.read_text(encoding="utf-8")
    assert matrix.shown(page) == page
    for name, versions in matrix.MATRIX.items():
        for version in versions:
            assert f"| {name} {version} |" in page
    assert "**other**" not in page  # no stored row has any


def test_lines(matrix):
    def line(*rows, version="0.50.2", name="bitsandbytes"):
        return matrix.line(name, version, [row(date="2020"), *rows])

    assert line() == "| bitsandbytes 0.50.2 | `dequantize_4bit` | same; 0 of 64 |  |"
    assert "not measured" in line(version="0.49.2")
    assert "**other**" in line(row(same_bits=False))
    refused = row(switched=[], refused={"bitsandbytes": "bits differ", "peft": "bits differ"})
    assert "not switched: bits differ" in line(refused)
    old = row(same_bits=None, problem="ImportError: no")
    old["versions"] = old["versions"] | {"bitsandbytes": "0.45.5"}
    assert "not measured: ImportError: no" in line(old, version="0.45.5")
    other = row(varied="peft", device="NVIDIA H100")
    other["versions"] = other["versions"] | {"peft": "0.15.2", "python": "3.10.1"}
    assert "| NVIDIA H100, python 3.10.1 |" in line(other, name="peft", version="0.15.2")
    assert "same" in line(name="torch", version="2.13.0") and "same" in line(name="python", version="3.11")
    assert "not measured" in line(name="python", version="3.1")


def test_a_row_replaces_the_one_of_the_same_versions(matrix, tmp_path):
    file = tmp_path / "matrix.json"
    for one in (row(), row(device="NVIDIA H100"), row(same_bits=False)):
        matrix.store(file, one)
    rows = json.loads(file.read_text())["rows"]
    assert [(one["device"], one["same_bits"]) for one in rows] == [("NVIDIA H100", True), ("cpu", False)]
