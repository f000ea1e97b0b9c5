"""One benchmark result in which every goal is met with nothing to spare."""

import pytest

from helpers.results import names
from helpers.results.old_store import (
    Benchmark,
    ByteMover,
    Cases,
    Cold,
    Compile,
    CompileCase,
    Compiles,
    Entry,
    Gpu,
    GpuCase,
    Host,
    HostCase,
    Protocol,
    Starts,
    Times,
)


def rows(**p50):
    """{name: Times} of these medians, microseconds."""
    return {name: Times(p50=value, rounds=20) for name, value in p50.items()}


def entry(label, *seconds, **more):
    return Entry(label=label, seconds=list(seconds), per_config={}, identical=True, **more)


@pytest.fixture
def data():
    layer = {"shape": (1024, 4096), "dtype": "bfloat16"}
    fill = {names.ALLOCATE_FILL: Times(p50=10.0, rounds=20)}
    gpu = [
        GpuCase(
            numel=numel,
            dtype=dtype,
            rows=rows(
                kernel=100.0,
                unsloth_today=100.0 if (numel, dtype) == (2**30, "float16") else 112.0,
                ceiling_cuda=100.0 * names.SHARES.get(numel, 0.5),
            ),
        )
        for numel in (names.SMALLEST, *names.TARGET_SIZES, names.LARGEST)
        for dtype in names.DTYPES
    ]
    start = {"import_torch": 1.0, "first_call": 0.2, "second_call": 0.001}
    return Benchmark(
        quick=False,
        protocol=Protocol(
            entries={
                "kernel": entry("kernel", 0.25, 0.25),
                "unsloth_today": entry("Unsloth today", 0.39, 0.41, 0.40),
                "unsloth_classic": entry("Unsloth classic", 0.5),
                "peft": Entry(label="PEFT", seconds=[0.75], per_config={}, identical=False),
                "bitsandbytes": Entry(label="bitsandbytes", seconds=[], per_config={}, reason="absent"),
            },
            rounds=1000,
            repeats=3,
            checked_against="Unsloth today",
            device="cuda",
            configs=["a"],
        ),
        byte_mover=ByteMover(rounds=1000, seconds={"kernel": [1.0], "byte_mover": [0.95]}),
        host=Host(
            cases=[
                HostCase(
                    **layer,
                    returned=rows(kernel=10.5, unsloth_today=29.0) | fill,
                    synchronized=rows(kernel=10.5, unsloth_today=19.0) | fill,
                )
            ],
            units={},
            parts={},
        ),
        gpu=Gpu(sizes=gpu),
        call_cost={"kernel": dict(bytecodes=212, python_calls=9, c_calls=31)},
        gemm=Cases(
            cases=[
                GpuCase(
                    **layer,
                    tokens=6144,
                    rows=rows(kernel=500.0) | {"multiplication alone": Times(p50=454.5, rounds=20)},
                )
            ]
        ),
        compile=Compile(
            weights=24,
            shape=(1024, 2816),
            dtype="bfloat16",
            cases=[
                CompileCase(
                    tokens=tokens,
                    backward=backward,
                    eager=rows(kernel=800.0, unsloth_today=1345.0, bitsandbytes=1948.0),
                    compiled=rows(kernel=800.0, unsloth_today=960.0, bitsandbytes=1760.0),
                )
                for tokens in (64, 2048)
                for backward in (False, True)
            ],
            call_eager=rows(kernel=8.3),
            call_compiled=rows(kernel=7.0),
        ),
        compiles=Compiles(rows=[dict(dtype="float16", state="nested", compiles=1)]),
        cold=Cold(kernel=Starts(empty=[start | {"first_call": 1.0}], warm=[start])),
        ablation=Cases(
            cases=[
                GpuCase(
                    numel=2**22,
                    dtype=dtype,
                    rows={"as chosen": Times(p50=3.6, rounds=20), **extra},
                )
                for dtype, extra in (
                    ("float16", {}),
                    ("bfloat16", {"4 warps": Times(p50=3.9, rounds=20)}),
                )
            ]
        ),
    )
