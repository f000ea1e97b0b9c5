"""The kernel compiles within budget with every supported Triton: `pytest -m long tests/t4`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_sass  # noqa: E402
import triton_versions  # noqa: E402

from helpers.t4 import compile, sass  # noqa: E402

STAGED = (3, 4)  # from here on code2 goes through shared memory, and no load waits for another


def wrong_in_ptx(code):
    """What the PTX should contain and does not, or should not and does."""
    variant, absent = code.variant, ["fma.rn"]
    expected = [f".target sm_{variant.arch}", "shfl.sync.idx.b32", "mul.rn.ftz.f32", "st.global.cs"]
    expected += ["add.rn.f32"] * variant.nested + ["prmt.b32"] * (variant.dtype != "fp32")
    if variant.arch < 80:
        expected, absent = [*expected, "evict_first"], [*absent, ".bf16"]
    elif variant.dtype == "bf16":
        expected.append("cvt.rn.bf16")
    ptx = code.built.ptx
    return [f"no {x} in the PTX" for x in expected if x not in ptx] + [
        f"{x} in the PTX" for x in absent if x in ptx
    ]


@pytest.mark.long
@pytest.mark.parametrize("version", triton_versions.VERSIONS)
def test_every_dtype_and_card_is_within_budget(version, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(triton_versions.install(version)))
    variants = [compile.Variant(arch, dtype) for arch in (75, 80, 90) for dtype in compile.DTYPES]
    variants += [compile.Variant(75, dtype, nested=False) for dtype in compile.DTYPES]
    codes, wrong = list(map(sass.Code, compile.build(variants))), []
    for code in codes:
        faults, used = code.faults() + wrong_in_ptx(code), code.built.triton
        assert version == "newest" or used.startswith(version), f"{used} compiled instead of {version}"
        if tuple(map(int, used.split(".")[:2])) < STAGED:
            faults = [fault for fault in faults if "loaded behind a wait" not in fault]
        wrong += [f"{code.name}: {fault}" for fault in faults]
        assert test_sass.SIMULATED.get(used, {}).get(code.name, code.hash) == code.hash
    assert not wrong
