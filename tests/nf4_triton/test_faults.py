"""When things go wrong: no memory, no compilation; and what ten thousand layers leave behind.

Malformed states by field are in test_bad_input.py.
"""

import copy
import gc
import resource

import pytest
import torch

from helpers.puzzle import layers
from nf4_triton import launch, reference, replay
from nf4_triton.reference import same_bits
from states import exact, random_state

ON_GPU = pytest.mark.gpu


def right(weight, state):
    return exact(launch._your_dequantize_nf4(weight, state), weight, state)


def through_the_operator(weight, state):
    return launch.call_operator(launch.read_state(weight, state), None)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_the_scale_of_a_last_partial_block_must_be_there(nested):
    """65 elements are two blocks of 64."""
    weight, state = random_state((65, 1), torch.float16, nested)
    assert state.absmax.numel() == 2 and right(weight, state)
    state.absmax = state.absmax[:1].clone()
    with pytest.raises(launch.UnsupportedState, match="absmax has 1 elements.*expected 2"):
        launch._your_dequantize_nf4(weight, state)


def test_out_of_memory_reaches_the_caller_and_the_next_call_works(monkeypatch):
    """Every allocation of the call fails once: the first call's, then the replayed one's."""
    weight, state = random_state((64, 320), torch.bfloat16)

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("as a test")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "empty_cuda", full)
            patch.setattr(torch, "empty", full)
            with pytest.raises(torch.OutOfMemoryError, match="as a test"):
                launch._your_dequantize_nf4(weight, state)
        assert right(weight, state)


def test_a_launch_that_fails_is_an_error_and_the_next_call_works(monkeypatch):
    class Failing:
        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments, **options):
            raise ValueError("ptxas exited with 255")

    weight, state = random_state((64, 320), torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_your_dequantize_nf4_kernel", Failing())
        with pytest.raises(Exception, match="ptxas exited with 255"):
            launch._your_dequantize_nf4(weight, state)
    assert right(weight, state)


MULTIPLY = "mul.rn.ftz.f32 a, $1, $3;"


@ON_GPU
def test_the_cache_serves_no_older_kernel(changed_kernel):
    """After a change of the assembly the very next call runs the new one, compiled or not."""
    changed = changed_kernel("changed", MULTIPLY, "mul.rn.ftz.f32 a, $1, 0f00000000;")
    layer = layers.quantized_layer(64, 320, torch.float16)
    expected = launch.your_dequantize_nf4(layer)
    for call in (changed.your_dequantize_nf4, torch.compile(changed.your_dequantize_nf4, fullgraph=True)):
        with changed.force(asm=True):
            result = call(layer)
        assert reference.different(result, expected) > result.numel() // 4
    assert same_bits(launch.your_dequantize_nf4(layer), expected)


def test_layers_come_and_go_without_growth(device):
    """10,000 layers on a GPU, 30 in the interpreter: made, used twice, dropped."""
    count = 10_000 if device == "cuda" else 30

    def use(layers):
        for seed in range(layers):
            weight, state = random_state((64, 96), torch.float16, seed=seed)
            for call in [launch._your_dequantize_nf4] * 2 + [through_the_operator] * (seed % 10 == 0):
                call(weight, copy.copy(state))
        gc.collect()
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return len(gc.get_objects()), kilobytes, torch.cuda.memory_allocated() if device == "cuda" else 0

    before, after = use(count // 10), use(count)
    assert after[0] - before[0] < count, "Python objects pile up"
    assert after[1] - before[1] < 64 * 2**10, "the process grows"
    assert after[2] == before[2] and len(replay.cached) < 1024
