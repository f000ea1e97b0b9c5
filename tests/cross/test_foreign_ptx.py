"""PTX of other cards on this GPU: every bit compared, every fault seen."""

import math

import pytest
import torch

from helpers.cross import compile, foreign_ptx, sass
from nf4_triton import environment

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize(
    "position, value, fault",
    [
        (None, 0.0, "7 of 7 cases exact"),
        (-1, math.nan, ": 1 differ, 0 written outside"),  # not written
        (0, 1.0, ": 0 differ, 1 written outside"),
    ],
)
def test_wrong_bits_missing_elements_and_writes_outside_are_seen(monkeypatch, capsys, position, value, fault):
    """Everything but the launch, which writes bitsandbytes' own result here; position: from the end on."""

    def run_foreign(weight, state, out, arch):
        assert arch == 75 and out.isnan().all()
        out.copy_(bitsandbytes.functional.dequantize_4bit(weight, state))
        if position is not None:
            whole = torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
            whole[out.storage_offset() + out.numel() + position] = value

    monkeypatch.setattr(foreign_ptx, "run_foreign", run_foreign)
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(environment, "gpu_name", lambda: "Some GPU")
    monkeypatch.setattr(compile, "DTYPES", {"fp16": torch.float16})
    monkeypatch.setitem(foreign_ptx.SIZES, "random layer", (416, 100))
    assert foreign_ptx.report([75], "cpu") == (0 if position is None else 1)
    assert fault in capsys.readouterr().out


def test_on_a_gpu_that_is_too_old_nothing_runs(monkeypatch, capsys):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    assert sass.main(["--arch", "80", "90", "--run"]) == 2
    assert "PTX for sm_80: not run (needs an NVIDIA GPU of sm_80 or newer)" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("arch", (75, 80, 86, 89, 90))  # whose PTX a Hopper GPU runs
def test_ptx_of_other_cards_is_exact(arch, capsys):
    if torch.cuda.get_device_capability() < divmod(arch, 10):
        pytest.skip(f"needs a GPU of sm_{arch} or newer")
    assert foreign_ptx.report([arch]) == 0
    assert "21 of 21 cases exact" in capsys.readouterr().out
