"""The tool behind the table of libraries."""

import json

import pytest
import torch

from helpers import machine
from helpers.nf4 import reference
from helpers.stress import libraries
from helpers.stress.libraries import LAYOUTS

pytest.importorskip("bitsandbytes")


def test_a_row_of_each_kind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    names = ["nf4, nested, bf16", "blocksize 96", "between two calls: offset replaced"]
    status = libraries.main(["--libraries", "bitsandbytes", "--", *names])
    (path,) = tmp_path.rglob("libraries.json")
    data = json.loads(path.read_text())["data"]
    assert status == 0
    assert [data["bitsandbytes"][name]["outcome"] for name in names] == ["exact", "refused", "exact"]
    assert "| blocksize 96 | refused |" in capsys.readouterr().out


def test_a_wrong_library_and_one_that_breaks(device):
    good, broken = LAYOUTS["nf4, flat"], LAYOUTS["absmax half as long"]
    stale = LAYOUTS["between two calls: offset replaced"]

    def oracle(layer):
        return reference.dequantize(layer.weight, layer.weight.quant_state)

    first = {}

    def cached(layer):
        return first.setdefault(id(layer), oracle(layer))

    assert libraries.judge(oracle, good, device)["outcome"] == "exact"
    assert libraries.judge(lambda layer: oracle(layer) * 2, good, device)["outcome"] == "wrong"
    assert libraries.judge(lambda layer: oracle(layer).t(), good, device)["outcome"] == "wrong"
    assert libraries.judge(lambda layer: 1 / 0, good, device)["outcome"] == "refused"
    assert libraries.judge(lambda layer: torch.zeros(3), broken, device)["outcome"] == "accepted"
    assert libraries.judge(oracle, stale, device)["outcome"] == "exact"
    assert libraries.judge(cached, stale, device)["outcome"] == "wrong"


def test_a_process_that_dies_is_a_crash_and_the_rest_goes_on(monkeypatch):
    def lines(*outcomes):
        rows = [{"name": name, "outcome": outcome, "text": ""} for name, outcome in outcomes]
        return "\n".join(map(json.dumps, [{"absent": ""}, *rows]))

    ends = iter([
        machine.Done(-11, lines(("a", "exact")), ""),
        machine.Done(libraries.CRASHED, lines(("c", "crash")), ""),
        machine.Done(0, lines(("d", "wrong")), ""),
    ])  # fmt: skip
    monkeypatch.setattr(machine, "python", lambda arguments, **options: next(ends))
    rows = libraries.examine("bitsandbytes", ["a", "b", "c", "d"])
    outcomes = {"a": "exact", "b": "crash", "c": "crash", "d": "wrong"}
    assert {name: row["outcome"] for name, row in rows.items()} == outcomes
    assert rows["b"]["text"] == "the process ended with -11"


def test_the_libraries_own_functions_where_unsloth_cannot_come():
    """Not the wrapper that unsloth_zoo puts in its place: proved by module and file."""
    code = """
import importlib
from helpers import machine
machine.prepare()
from helpers.stress import libraries
for library in ("peft", "bitsandbytes"):
    function, reason = libraries.library_function(library)
    assert function and not reason, reason
import bitsandbytes.functional as functional
own = functional.dequantize_4bit
assert own.__module__ == functional.__name__ and own.__code__.co_filename == functional.__file__
for name in ("unsloth", "unsloth_zoo"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} can be imported")
"""
    machine.python(["-c", code])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, outcome", [("more than 2^31 elements", "crash"), ("absmax not contiguous", "exact")]
)
def test_what_bitsandbytes_alone_does(name, outcome):
    """Without Unsloth's wrapper it ends the process beyond 2^31 elements; a strided absmax it decodes."""
    assert libraries.examine("bitsandbytes", [name])[name]["outcome"] == outcome
