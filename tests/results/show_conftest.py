"""One stored run of every kind, of a card that does not exist."""

import pytest

from helpers import machine
from helpers.results import names, old_store as results
from helpers.results.old_store import Times

SIZES = (2**16, 2**22, 58_720_256, 2**30)
CARD = "Card of a test"
FACTS = dict(machine.describe(), gpu=CARD, date="2030-01-02T03:04:05+00:00", torch="9.9", triton="8.8")


def invented(position: int, *parts) -> float:
    """Some number that differs for every series and every point, the same in each run."""
    return 10.0 + position + sum(ord(letter) for letter in "".join(map(str, parts))) % 97


def rows(series, *key):
    return {name: Times(p50=invented(i, name, *key), rounds=20) for i, name in enumerate(series)}


@pytest.fixture
def result():
    """A whole benchmark with the label of the kernel `0123abcd`."""
    contenders = ("kernel", *names.BASELINES_ON_GPU)
    gpu = [
        dict(shape=[numel // 64, 64], numel=numel, dtype=dtype,
             rows=rows((*contenders, names.CEILING), numel, dtype))
        for numel in SIZES for dtype in names.DTYPES
    ]  # fmt: skip
    gpu.append(dict(shape=[2, 2], numel=2**31, dtype="float16", skipped="needs more memory"))
    hosts = (*contenders, "peft", names.ALLOCATE_FILL)
    fields = ("returned_us", "wait_us", "allocate_us", "launch_us", "rest_us")
    parts = {}
    for name in hosts:
        parts[name] = {key: invented(i, name, key) for i, key in enumerate(fields)}
        parts[name] |= {"allocations": 1, "kernels": 1}
    case = dict(shape=[8192, 7168], dtype="bfloat16")
    cases = [dict(case, returned=rows(hosts, 1), synchronized=rows(hosts, 2))]
    data = dict(quick=False, gpu=dict(sizes=gpu), host=dict(cases=cases, units={}, parts=parts))
    return make("benchmark", data)


def make(name: str, data):
    """A Result of what would be in a file of that name."""
    content = dict(environment=FACTS, kernel={"label": "0123abcd"}, data=data)
    return results.msgspec.convert(content, results.Result[results.SCHEMA[name]], from_attributes=True)


@pytest.fixture
def training():
    spread = dict(p20=0.9, p50=1.0, p80=1.1)
    arm = dict(ms=spread, gpu_ms=10.0, dequantize_ms=2.0)

    def size(tokens, p50):
        speed = dict(p20=p50 - 0.02, p50=p50, p80=p50 + 0.02, low=p50 - 0.01, high=p50 + 0.01)
        return {
            "rows": 1, "length": tokens, "tokens": tokens, "same_bits": True, "repeatable": True,
            "different_results": {}, "strict": False, "without": arm, "with": arm, "speedup": speed,
            "rounds": 9, "steps_a_round": 1, "calls": {"kernel": 5, "library": 2},
        }  # fmt: skip

    libraries = {"peft": {"sizes": [size(128, 1.2), size(512, 1.1)]}, "unsloth": {"failed": "why"}}
    return make("training", {"libraries": libraries})
