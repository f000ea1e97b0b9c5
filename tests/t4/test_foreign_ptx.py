"""PTX of another card through the driver: its entry, its arguments, and the proof itself on a GPU."""

import ctypes

import pytest
import torch

from helpers.machine import environment
from helpers.t4 import foreign_ptx, sass

PTX = """
.version 8.7
.target sm_75
.visible .entry copy(
	.param .u64 .ptr .global .align 1 copy_param_0,
	.param .u64 copy_param_1,
	.param .u32 copy_param_2,
	.param .u64 .ptr .global .align 1 copy_param_3
)
.reqntid 128
{ ret; }
"""


def test_the_entry_is_read():
    assert foreign_ptx.entry(PTX) == foreign_ptx.Entry("copy", "sm_75", ("u64", "u64", "u32", "u64"))


def test_an_unknown_kernel_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'other'.*'copy'"):
        foreign_ptx.entry(PTX, "other")


def test_two_kernels_need_a_name():
    two = PTX + PTX.replace("copy", "move")
    assert foreign_ptx.entry(two, "move").name == "move"
    with pytest.raises(ValueError):
        foreign_ptx.entry(two)


def test_arguments_get_their_widths_and_scratch_pointers_nulls():
    tensor = torch.zeros(4)
    values = foreign_ptx.pack(("u64", "u64", "u32", "u64"), [tensor, 7, -1])
    assert [value.value for value in values] == [tensor.data_ptr(), 7, 2**32 - 1, 0]
    assert [ctypes.sizeof(value) for value in values] == [8, 8, 4, 8]


@pytest.mark.parametrize("arguments", [[1, 2], [1, 2, 3, 4, 5]])
def test_arguments_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError, match="do not fit"):
        foreign_ptx.pack(("u64", "u64", "u32", "u64"), arguments)


def test_tensors_must_be_on_a_gpu():
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        foreign_ptx.run_ptx(PTX, None, (1,), 4, [torch.zeros(4), torch.zeros(4), 1])


@pytest.mark.skipif(environment.has_gpu(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_proof_says_what_it_needs():
    evidence = foreign_ptx.prove()
    assert evidence["passed"] is None
    assert foreign_ptx.summary(evidence) == "PTX compiled for sm_75: not run (needs an NVIDIA GPU)"


def test_the_real_kernel_takes_the_launchers_arguments():
    compiled = sass.compile_kernel("float16", True, 75)
    found = foreign_ptx.entry(compiled.ptx, compiled.name)
    assert found.target == "sm_75"
    kernel_arguments = [parameter for parameter in found.parameters if parameter == "u32"]
    assert len(kernel_arguments) == 2  # n_words and n_tail, as launch_arguments gives them
    foreign_ptx.pack(found.parameters, [0] * 7 + [1, 1])


def case(**changes):
    return {"case": "random layer", "dtype": "float16", "nested": True, "elements": 8, "differing": 0} | {
        "written_outside": 0,
        "target": "sm_75",
        **changes,
    }


def evidence(*cases, passed):
    return {
        "passed": passed,
        "arch": 75,
        "device": "Some GPU",
        "capability": [9, 0],
        "triton": "3.6.0",
        "bitsandbytes": "0.50.2",
        "elements": sum(c["elements"] for c in cases),
        "differing": sum(c["differing"] for c in cases),
        "cases": list(cases),
    }


def test_the_summary_of_a_failure_names_the_case():
    text = foreign_ptx.summary(evidence(case(), case(differing=3, nested=False), passed=False))
    assert "3 of 16 elements differ" in text and "NOT equal" in text
    assert "random layer, float16, flat: 3 differ" in text
    assert "every bit equal" in foreign_ptx.summary(evidence(case(), passed=True))


def test_on_a_card_of_that_kind_there_is_nothing_foreign(monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "capability", lambda device: (7, 5))
    found = foreign_ptx.prove()
    assert found["passed"] is None and "this one is an sm_75" in foreign_ptx.summary(found)


@pytest.mark.gpu
def test_sm_75_ptx_is_exact_on_the_gpu_at_hand():
    if environment.capability() == (7, 5):
        pytest.skip("needs a card that is no sm_75")
    pytest.importorskip("bitsandbytes")
    found = foreign_ptx.prove("cuda")
    print(foreign_ptx.summary(found))
    assert found["passed"], foreign_ptx.summary(found)
    assert len(found["cases"]) == 3 * 2 * len(foreign_ptx.CASES)
    assert {c["target"] for c in found["cases"]} == {"sm_75"}


@pytest.mark.gpu
def test_the_proof_notices_a_wrong_kernel(monkeypatch):
    pytest.importorskip("bitsandbytes")
    real = sass.compile_kernel

    def wrong(*args, **overrides):
        import dataclasses

        compiled = real(*args, **overrides)
        broken = compiled.ptx.replace("shfl.sync.idx.b32", "shfl.sync.bfly.b32")
        assert broken != compiled.ptx
        return dataclasses.replace(compiled, ptx=broken)

    monkeypatch.setattr(sass, "compile_kernel", wrong)
    found = foreign_ptx.prove("cuda")
    assert found["passed"] is False and found["differing"] > 0


@pytest.mark.gpu
def test_a_text_the_driver_refuses_raises_with_its_words():
    broken = PTX.replace("{ ret; }", "{ nonsense.u32 %r1; ret; }")
    tensor = torch.zeros(4, device="cuda")
    with pytest.raises(foreign_ptx.DriverError, match="loading the PTX"):
        foreign_ptx.run_ptx(broken, "copy", (1,), 4, [tensor, tensor, 1])
