"""The section host_time of `python -m helpers bench`: one call, without and with the wait for the GPU."""

from collections.abc import Iterator

import torch

from helpers.bench import clocks, contenders
from helpers.bench.contenders import exact_calls, us
from helpers.puzzle import protocol
from helpers.puzzle.layers import quantized_layer
from helpers.results.store import Row

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight


def time_host(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns, and with a synchronize after every call."""
    layer = quantized_layer(*scope.layer, torch.bfloat16)
    functions = contenders.all_contenders() | contenders.writing_into_out(layer)
    calls = exact_calls(functions, layer, problems)
    with protocol.own_libraries():
        yield from us("host_time", "until_return", clocks.host_seconds(calls, scope.rounds, scope.inner))
        waited = clocks.host_seconds(calls, scope.rounds, scope.inner, wait=True)
        yield from us("host_time", "synchronized", waited)
