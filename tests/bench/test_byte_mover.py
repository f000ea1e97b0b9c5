import dataclasses
import math
from unittest import mock

import pytest
import torch

from helpers.bench import byte_mover, ceilings
from helpers.bench.contenders import FULL, Bench, random_layers
from helpers.puzzle import protocol


def parameters(kernel) -> list:
    return [(p.name, p.is_constexpr, p.do_not_specialize) for p in kernel.params]


def test_it_takes_the_arguments_of_the_kernel(kernel):
    ours = kernel._your_dequantize_nf4_kernel
    fn = byte_mover.moving_kernel
    assert fn.arg_names == ours.arg_names
    if hasattr(ours, "params"):  # not in Triton's interpreter
        assert parameters(fn) == parameters(ours)


@pytest.mark.parametrize("words", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [64 * 64, 2**16 + 64])
def test_every_byte_is_read_and_every_element_written(kernel, device, dtype, numel, words):
    (layer,) = random_layers((numel // 64, 64), dtype, 1, device=device)
    state = layer.weight.quant_state
    out = torch.full((numel // 64, 64), math.nan, dtype=dtype, device=device)
    with (
        kernel.force(words_small=words),
        mock.patch.object(kernel, byte_mover.KERNEL, byte_mover.moving_kernel),
    ):
        kernel._your_dequantize_nf4(layer.weight, state, out)
        threads = 32 * kernel.settings().num_warps
    expected = ceilings.oracle(layer.weight, state.absmax, state.state2.absmax, numel, words, threads)
    assert torch.equal(out.view(torch.int32).view(-1, 4), expected), "which depends on every byte"


def test_both_take_turns_and_the_kernel_is_put_back(bench):
    ours = bench.module._your_dequantize_nf4_kernel
    found = byte_mover.byte_mover(bench)
    assert bench.module._your_dequantize_nf4_kernel is ours
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {"kernel": 2, "byte_mover": 2}
    assert found.rounds == 2
    layer = protocol.bnb_Linear4bit(64, 64)
    assert protocol.same_bits(bench.module.your_dequantize_nf4(layer), protocol.expected(layer))


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_the_byte_mover_is_no_slower_than_the_kernel(kernel):
    bench = Bench(
        kernel, protocol.baselines(), True, dataclasses.replace(FULL, configs=protocol.OFFICIAL[:1])
    )
    assert 0.5 < byte_mover.byte_mover(bench).share < 1.1
