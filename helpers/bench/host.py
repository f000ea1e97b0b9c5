"""The section host_time of `python -m helpers bench`: one call, without and with the wait for the GPU."""

from collections.abc import Iterator

import torch

from helpers.bench import clocks, contenders
from helpers.bench.contenders import exact_weight, us
from helpers.puzzle import protocol
from helpers.puzzle.layers import quantized_layer
from helpers.results.store import Row
from nf4_triton.backend import dequantize

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight


def time_host(problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns, and with a synchronize after every call.

    Beside the contenders: the package's dequantize() with `out=`, and with all rows chosen by their ids.
    """
    layer = quantized_layer(*LAYER, torch.bfloat16)
    expected, state = exact_weight(layer), layer.weight.quant_state
    out, ids = torch.empty_like(expected), torch.arange(len(expected), device=expected.device)
    functions = {
        **contenders.all_contenders(),
        "ours_out": lambda layer: dequantize(layer.weight, state, out=out),
        "ours_rows": lambda layer: dequantize(layer.weight, state, rows=ids),
    }
    with protocol.own_libraries():
        calls = contenders.exact(functions, layer, expected, problems, "host_time")
        yield from us("host_time", "until_return", clocks.host_seconds(calls, clocks.ROUNDS, clocks.INNER))
        waited = clocks.host_seconds(calls, clocks.ROUNDS, clocks.INNER, wait=True)
        yield from us("host_time", "synchronized", waited)
