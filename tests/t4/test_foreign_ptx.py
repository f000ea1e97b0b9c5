"""PTX of other cards on this GPU: every bit compared, every fault seen."""

import copy

import pytest
import torch

from helpers.nf4 import environment
from helpers.t4 import compile, foreign_ptx, sass

bitsandbytes = pytest.importorskip("bitsandbytes")
ON_HOPPER = (75, 80, 86, 89, 90)  # whose PTX a Hopper GPU runs


@pytest.mark.parametrize(
    "position, value, fault",
    [
        (None, 0.0, ""),
        (-1, 7.0, "1 differ, 0 outside"),
        (-1, float("nan"), "1 differ, 0 outside"),
        (0, 1.0, "0 differ, 1 outside"),
    ],
    ids=["right", "wrong bits", "not written", "outside"],
)
def test_wrong_bits_missing_elements_and_writes_outside_are_seen(monkeypatch, position, value, fault):
    """Everything but the launch, which writes bitsandbytes' own result here; position: from the end on."""

    def run_foreign(weight, state, out, arch):
        assert arch == 75 and out.isnan().all()
        out.copy_(bitsandbytes.functional.dequantize_4bit(weight, state))
        if position is not None:
            whole = torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
            whole[out.storage_offset() + out.numel() + position] = value

    monkeypatch.setattr(foreign_ptx, "run_foreign", run_foreign)
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "capability", lambda *device: (9, 0))
    monkeypatch.setattr(environment, "gpu_name", lambda: "Some GPU")
    monkeypatch.setitem(foreign_ptx.SIZES, "random layer", (416, 100))
    passed, text = foreign_ptx.report(75, "cpu", (torch.float16,))
    assert passed is (position is None) and "on Some GPU:" in text and "in 7 cases" in text
    assert text.count(fault) == 7 if fault else "NOT" not in text


@pytest.mark.parametrize("has, capability", [(False, None), (True, (7, 5))])
def test_without_a_gpu_that_is_new_enough_nothing_runs(monkeypatch, capsys, has, capability):
    monkeypatch.setattr(environment, "has_gpu", lambda: has)
    monkeypatch.setattr(environment, "capability", lambda *device: capability)
    assert sass.main(["--arch", "80", "90", "--run"]) == 2
    assert "PTX for sm_80: not run (needs an NVIDIA GPU of sm_80 or newer)" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ON_HOPPER)
def test_ptx_of_other_cards_is_exact(arch):
    passed, text = foreign_ptx.report(arch)
    if passed is None:
        pytest.skip(text)
    assert passed and "in 21 cases" in text, text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "old, new, message",
    [
        ("shfl.sync.idx.b32", "shfl.sync.bfly.b32", ""),
        ("shfl.sync.idx.b32", "nonsense.b32", "PTX"),
        (".target sm_75", ".target sm_70", "did not compile for sm_75"),
    ],
)
def test_wrong_ptx_is_noticed(monkeypatch, old, new, message):
    real = compile.compiled

    def compiled(*launch):
        found = copy.copy(real(*launch))  # Triton keeps the original
        found.module, found._run = None, None
        assert old in found.asm["ptx"]
        found.asm = {"ptx": found.asm["ptx"].replace(old, new)}
        return found

    monkeypatch.setattr(compile, "compiled", compiled)
    if message:
        with pytest.raises(RuntimeError, match=message):
            foreign_ptx.report(75, dtypes=(torch.float16,))
    else:
        passed, text = foreign_ptx.report(75, dtypes=(torch.float16,))
        assert passed is False and "NOT equal" in text
