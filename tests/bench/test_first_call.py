from pathlib import Path

import pytest

from helpers import machine
from helpers.bench import first_call


def test_each_repeat_starts_with_an_empty_cache_that_the_warm_process_shares(monkeypatch):
    seen = []

    def measure(job, cache):
        seen.append((job, cache, list(Path(cache).iterdir())))
        (Path(cache) / "compiled").touch()
        return {"first_call": float(len(seen))}

    monkeypatch.setattr(first_call, "measure", measure)
    starts = first_call.starts("kernel", 3)
    folders = [cache for _, cache, _ in seen]
    assert folders[::2] == folders[1::2] and len(set(folders)) == 3
    assert all(not content for _, _, content in seen[::2])
    assert all([path.name for path in content] == ["compiled"] for _, _, content in seen[1::2])
    assert not any(Path(folder).exists() for folder in folders)
    assert starts.median("empty") == 3.0 and starts.median("warm") == 4.0


def test_a_fresh_process_that_fails_says_why(tmp_path):
    if machine.has_gpu():
        pytest.skip("there is a GPU: the process would not fail")
    with pytest.raises(machine.ChildFailed, match="trivial ended with 1(.|\n)*(CUDA|NVIDIA)"):
        first_call.measure("trivial", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.slow
def test_a_first_call_with_a_warm_cache_is_faster(tmp_path):
    empty, warm = (first_call.measure("kernel", str(tmp_path))["first_call"] for _ in range(2))
    assert 0 < warm < empty
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.gpu
@pytest.mark.slow
def test_few_compiles_for_each_dtype_and_state_kind():
    """All layer shapes of two models: up to a size loads carry hints, above they do not."""
    rows = first_call.compiles(None).rows
    assert {(row["dtype"], row["state"]) for row in rows} == {
        (dtype, state) for dtype in ("float16", "bfloat16") for state in ("nested", "flat")
    }
    assert {row["compiles"] for row in rows} <= {1, 2}
