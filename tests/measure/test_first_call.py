from pathlib import Path

import pytest

from helpers.machine import environment
from helpers.measure import first_call


def test_each_repeat_starts_with_an_empty_cache_that_the_warm_process_shares(monkeypatch):
    seen = []

    def measure(job, cache):
        seen.append((job, cache, list(Path(cache).iterdir())))
        (Path(cache) / "compiled").touch()
        return {"first_call": float(len(seen)), "process": 1.0}

    ticks = []
    monkeypatch.setattr(first_call, "measure", measure)
    found = first_call.starts("kernel", 3, lambda: ticks.append(1))
    folders = [cache for _, cache, _ in seen]
    assert folders[::2] == folders[1::2] and len(set(folders)) == 3 and len(ticks) == 6
    assert all(not content for _, _, content in seen[::2])
    assert all([path.name for path in content] == ["compiled"] for _, _, content in seen[1::2])
    assert not any(Path(folder).exists() for folder in folders)
    assert found["empty"]["median"] == {"first_call": 3.0, "process": 1.0}
    assert found["warm"]["median"]["first_call"] == 4.0 and len(found["warm"]["runs"]) == 3


def test_a_fresh_process_that_fails_says_why(tmp_path):
    if environment.has_gpu():
        pytest.skip("there is a GPU: the process would not fail")
    with pytest.raises(RuntimeError, match="trivial in a fresh process failed(.|\n)*(CUDA|NVIDIA)"):
        first_call.measure("trivial", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.slow
def test_first_calls_are_measured_in_order(tmp_path):
    found = first_call.measure("kernel", str(tmp_path))
    assert found["second_call"] < found["first_call"] < found["process"]
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.gpu
@pytest.mark.slow
def test_two_compiles_for_each_dtype_and_state_kind():
    """All layer shapes of two models: up to 8M elements loads carry hints, above they do not."""
    rows = first_call.compiles()["rows"]
    assert {(row["dtype"], row["state"]) for row in rows} == {
        (dtype, state) for dtype in ("float16", "bfloat16") for state in ("nested", "flat")
    }
    assert [row["compiles"] for row in rows] == [2, 2, 2, 2]
