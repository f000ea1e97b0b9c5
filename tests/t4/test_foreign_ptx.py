"""PTX of another card through the driver: its entry, its arguments, and the proof itself on a GPU."""

import copy

import pytest
import torch

from helpers import machine
from helpers.puzzle import protocol
from helpers.t4 import foreign_ptx, other_card


@pytest.mark.skipif(machine.has_gpu(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_proof_says_what_it_needs(capsys):
    proof = foreign_ptx.prove()
    assert proof["passed"] is None
    assert foreign_ptx.summary(proof) == "PTX compiled for sm_75: not run (needs an NVIDIA GPU)"
    assert foreign_ptx.main(["--arch", "75", "90"]) == 2
    assert "sm_90: not run (needs an NVIDIA GPU)" in capsys.readouterr().out


@pytest.fixture
def here(monkeypatch):
    """A machine that looks like one with a Hopper card; here(wrong) sets what its launches do wrong."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setitem(foreign_ptx.SIZES, "random layer", (416, 100))

    def launches(wrong=lambda around, start, end: None):
        def launch(self, grid, *arguments, **named):
            weight, out, *_ = arguments
            assert out.isnan().all() and grid[0] * named["THREADS"] * named["WORDS"] * 8 >= out.numel()
            layer = next(layer for layer in layers if layer.weight.data_ptr() == weight.data_ptr())
            out.copy_(protocol.expected(layer).view(out.shape))
            start = out.storage_offset()
            wrong(torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0), start,
                  start + out.numel())  # fmt: skip

        monkeypatch.setattr(other_card.ForeignKernel, "launch", launch)

    layers, make = [], foreign_ptx._layer
    monkeypatch.setattr(foreign_ptx, "_layer", lambda *a: layers.append(make(*a)) or layers[-1])
    return launches


def flip(around, start, end):
    around.view(torch.int16)[end - 1] ^= 1


def outside(around, start, end):
    around[end] = 1.0


def unwritten(around, start, end):
    around[start] = float("nan")


@pytest.mark.parametrize(
    "wrong", [None, flip, outside, unwritten], ids=lambda f: getattr(f, "__name__", "right")
)
def test_the_proof_sees_wrong_bits_missing_elements_and_writes_outside(here, wrong):
    """All but the launch itself, which writes bitsandbytes' own result here."""
    here(wrong) if wrong else here()
    proof = foreign_ptx.prove("cpu", 75, (torch.float16,))
    assert proof["passed"] is (wrong is None), proof
    assert [case["elements"] for case in proof["cases"]] == 2 * [2048 * 64, 416 * 100, 4099, 3 * 1365]
    faults = [case["fault"] for case in proof["cases"]]
    if not wrong:
        assert not any(faults)
        return
    differing, spilt = (0, 1) if wrong is outside else (1, 0)
    text = f"float16, {{}}, sm_75: {differing} differ, {spilt} written outside the output"
    kinds = [(case, kind) for kind in ("nested", "flat") for case in foreign_ptx.CASES]
    assert faults == [f"{case}, {text.format(kind)}" for case, kind in kinds]
    assert {case["differing"] for case in proof["cases"]} == {differing}
    summary = foreign_ptx.summary(proof)
    assert f"{8 * differing} of {sum(case['elements'] for case in proof['cases'])} elements differ" in summary
    assert "NOT equal" in summary and "Some GPU (sm_90):" in summary and faults[-1] in summary


def test_a_flat_layer_of_every_code_meets_256_scales():
    pytest.importorskip("bitsandbytes")
    layer = foreign_ptx._layer(foreign_ptx.EVERY, torch.float16, False, "cpu")
    state, data = layer.weight.quant_state, layer.weight.data.flatten()
    assert not state.nested and len(set(state.absmax.tolist())) > 200
    pairs = {(float(state.absmax[i // 32]), int(byte)) for i, byte in enumerate(data.tolist())}
    assert len(pairs) == 256 * len(set(state.absmax.tolist()))


def test_a_card_that_is_too_old_for_the_code_is_not_asked(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "capability", lambda device: (7, 5))
    proof = foreign_ptx.prove(arch=80)
    assert proof["passed"] is None and "needs a card of sm_80 or newer" in foreign_ptx.summary(proof)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", foreign_ptx.ON_HOPPER)
def test_ptx_of_other_cards_is_exact_on_the_gpu_at_hand(arch):
    pytest.importorskip("bitsandbytes")
    proof = foreign_ptx.prove("cuda", arch)
    if proof["passed"] is None:
        pytest.skip(f"needs {proof['needs']}")
    print(foreign_ptx.summary(proof))
    assert proof["passed"], foreign_ptx.summary(proof)
    assert len(proof["cases"]) == 3 * 2 * len(foreign_ptx.CASES)
    assert "every bit equal" in foreign_ptx.summary(proof)


def changed(monkeypatch, old, new):
    """From here on the PTX of other cards has `new` in the place of `old`."""
    real = other_card.compiled

    def compiled(*launch):
        found = copy.copy(real(*launch))  # Triton keeps the other, and gives it again
        found.module, found._run = None, None
        assert old in found.asm["ptx"]
        found.asm = {"ptx": found.asm["ptx"].replace(old, new)}
        return found

    monkeypatch.setattr(other_card, "compiled", compiled)


@pytest.mark.gpu
def test_the_proof_notices_a_wrong_kernel(monkeypatch):
    pytest.importorskip("bitsandbytes")
    changed(monkeypatch, "shfl.sync.idx.b32", "shfl.sync.bfly.b32")
    proof = foreign_ptx.prove("cuda", dtypes=(torch.float16,))
    assert proof["passed"] is False and any(case["differing"] for case in proof["cases"])


@pytest.mark.gpu
def test_a_text_the_driver_refuses_raises_with_its_words(monkeypatch):
    pytest.importorskip("bitsandbytes")
    changed(monkeypatch, "shfl.sync.idx.b32", "nonsense.b32")
    with pytest.raises(RuntimeError, match="PTX"):
        foreign_ptx.prove("cuda", dtypes=(torch.float16,))


@pytest.mark.gpu
def test_code_for_another_card_than_asked_for_is_refused(monkeypatch):
    pytest.importorskip("bitsandbytes")
    changed(monkeypatch, ".target sm_75", ".target sm_70")
    with pytest.raises(RuntimeError, match="another card than sm_75"):
        foreign_ptx.prove("cuda", dtypes=(torch.float16,))
