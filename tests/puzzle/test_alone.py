"""The notebook's file is the submission: alone in an empty folder, and pasted into the puzzle's notebook."""

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import nbformat
import pytest

from helpers import machine
from helpers.puzzle import run, sync

PUZZLE = """
import os
from inspect import currentframe

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import torch.nn as nn
import triton
import triton.language as tl
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import set_seed
from transformers.activations import ACT2FN
from triton import jit

DEVICE_COUNT = 1
_F = currentframe
W = V = _C = None  # short names of its own, which the kernel's cells must not need


def unsloth_dequantize(weight):
    return dequantize_4bit(weight.weight.data, weight.weight.quant_state)


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    return Linear4bit(hd, m, bias=None, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")


def assert_same(x, y, line, dtype):
    assert x.dtype == dtype, line
    torch.testing.assert_close(x, y, check_stride=True)


def assert_correct_bnb(weight, dtype):
    state = weight.weight.quant_state
    assert weight.weight.dtype == state.absmax.dtype == torch.uint8 and state.dtype == dtype
    assert state.blocksize == 64 and state.state2.blocksize == 256
    floats = (state.code, state.offset, state.state2.absmax, state.state2.code)
    assert {tensor.dtype for tensor in floats} == {torch.float32}


class MLP(nn.Module):
    def __init__(self, hd=4096, m=14336, dtype=torch.float16):
        super().__init__()
        self.gate_proj = bnb_Linear4bit(hd, m, dtype=dtype).to(DEVICE)
        self.up_proj = bnb_Linear4bit(hd, m, dtype=dtype).to(DEVICE)
        self.down_proj = bnb_Linear4bit(m, hd, dtype=dtype).to(DEVICE)
        for layer in (self.gate_proj, self.up_proj, self.down_proj):
            layer.weight.quant_state.dtype = dtype
        self.act_fn = ACT2FN["silu"]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp_forward(X, mlp, fx):
    up, gate = X @ fx(mlp.up_proj).t(), X @ fx(mlp.gate_proj).t()
    return mlp.act_fn(gate) * up @ fx(mlp.down_proj).t()


def mlp_dequantize(X, mlp, fx):
    return fx(mlp.up_proj).t(), fx(mlp.gate_proj).t(), fx(mlp.down_proj).t()


def test_dequantize(dequantize_fx):
    options = ((2, 33, 128, 448, 3407, torch.float16), (3, 20, 192, 320, 3408, torch.bfloat16))
    for bsz, qlen, hd, m, seed, dt in options:
        set_seed(seed)
        torch.set_default_dtype(torch.float32)
        mlp = MLP(hd=hd, m=m, dtype=dt)
        X = torch.randn((bsz, qlen, hd), dtype=dt, device=DEVICE)
        for _ in range(2):
            assert_same(mlp_forward(X, mlp, dequantize_fx), mlp(X), _F().f_lineno, dt)
            for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
                assert_correct_bnb(layer, dt)
            mine, theirs = (mlp_dequantize(X, mlp, fx) for fx in (dequantize_fx, unsloth_dequantize))
            for a, b in zip(mine, theirs):
                assert_same(a, b, _F().f_lineno, dt)
    return "passed"
"""
CALLS = """
def as_the_puzzle_calls_it(weight):
    return _your_dequantize_nf4(weight.weight.data, weight.weight.quant_state)


print(test_dequantize(your_dequantize_nf4), test_dequantize(as_the_puzzle_calls_it))
try:
    test_dequantize(lambda layer: -your_dequantize_nf4(layer))
except AssertionError as error:
    print("the wrong sign is seen:", "not close" in str(error))
"""


@pytest.fixture
def notebook():
    return nbformat.read(sync.NOTEBOOK, as_version=4)


def printed(notebook, cell_id):
    outputs = next(cell.outputs for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def alone(notebook):
    """Execute it in an empty folder: no repository, no `helpers`, nothing prepared in the environment."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in paths if path and not (Path(path) / "helpers").exists()]
    with tempfile.TemporaryDirectory(prefix="alone-") as folder, mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["PYTHONPATH"] = os.pathsep.join(packages)
        nbformat.write(notebook, Path(folder) / run.SOURCE.name)
        run.execute(notebook, Path(folder))


def test_alone_is_an_empty_folder_where_nothing_is_prepared(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(machine.ROOT))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = (
        "import importlib.util, os\n"
        f"assert os.listdir('.') == ['{run.SOURCE.name}'], os.listdir('.')\n"
        "assert importlib.util.find_spec('helpers') is None\n"
        "assert 'TRITON_INTERPRET' not in os.environ\n"
    )
    alone(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]))


def test_it_runs_alone_to_its_score(notebook, no_gpu):
    last = (
        "import sys\nprint([name for name in sys.modules if name.split('.')[0] in ('helpers', 'matplotlib')])"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(last, id="last"))
    alone(notebook)
    assert "Tested in fp16 and bf16                +1" in run.score_text(notebook)
    assert "of 14 points on this CPU (Triton's interpreter)" in run.score_text(notebook)
    assert printed(notebook, "repository").startswith("No repository of this notebook here")
    assert printed(notebook, "t4-ptx") == printed(notebook, "here") == ""
    assert printed(notebook, "last").strip() == "[]"


def paste(notebook, folder):
    """Execute the puzzle's stand-in with the kernel's cells pasted into it."""
    sources = [PUZZLE, *(cell.source for cell in sync.cells_of(notebook, "kernel")), CALLS]
    pasted = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    pasted.cells[-1]["id"] = "calls"
    run.execute(pasted, folder)
    assert printed(pasted, "calls") == "passed passed\nthe wrong sign is seen: True\n"


def test_its_kernel_runs_in_the_puzzles_own_notebook(notebook, tmp_path, no_gpu):
    paste(notebook, tmp_path)


@pytest.mark.gpu
def test_its_kernel_runs_in_the_puzzles_own_notebook_on_the_gpu(notebook, tmp_path):
    paste(notebook, tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_run_alone_leaves_its_result_file(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_BUILD", str(tmp_path))
    monkeypatch.setenv("NF4_QUICK", "1")
    alone(notebook)
    (path,) = tmp_path.glob("nf4_*.json")
    content = json.loads(path.read_text())
    assert content["environment"]["gpu"] and content["data"]["score"]["headline"] in run.score_text(notebook)
    assert content["data"]["protocol"]["entries"]["your_dequantize_nf4"]["seconds"]
    kernel = {cell.source.strip() for cell in sync.cells_of(notebook, "kernel")}
    assert kernel <= {text.strip() for text in content["cells"]}, "which kernel ran"
