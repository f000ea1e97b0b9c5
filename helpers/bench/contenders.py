"""The contenders, the layers they are timed on, and the comparison of bits that comes before any clock."""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch

from helpers.bench import clocks
from helpers.nf4 import launch
from helpers.nf4.reference import default_device, quantized_layer, same_bits
from helpers.puzzle import protocol

ON_GPU = ("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")  # PEFT launches bitsandbytes' kernels


def all_contenders() -> dict[str, Callable]:
    """Return {name: layer -> weight}: ours, its two slower launch forms, and every library installed here."""
    found = {"ours": launch.your_dequantize_nf4, "ordinary": ordinary}
    if clocks.ON_GPU:
        found["compiled_grid"] = CompiledGrid()
    return found | {name: one.fn for name, one in protocol.baselines().items() if one.fn}


def missing() -> dict[str, str]:
    """Return {name: why} of the libraries that cannot take part here."""
    return {name: one.reason for name, one in protocol.baselines().items() if not one.fn}


def ordinary(layer):
    """Launch the kernel as usual in Triton: `kernel[grid](...)`."""
    return launch.plain_dequantize_nf4(layer.weight, layer.weight.quant_state)


def first_launch(layer) -> tuple:
    """Launch the ordinary way; return (Triton's CompiledKernel, grid, all arguments in order)."""
    fields = launch._fields(layer.weight, layer.weight.quant_state)
    _, compiled, grid, arguments, constexprs, _ = launch._launch_plain(*fields)
    return compiled, (grid, 1, 1), [*arguments, *constexprs.values()]


class CompiledGrid:
    """Launch the compiled kernel as Triton's fused-softmax tutorial does: `compiled[grid](...)`.

    Takes nested layers; the first call of a shape and dtype compiles by an ordinary launch.
    """

    def __init__(self):
        self.launches = {}

    def __call__(self, layer):
        weight = layer.weight
        state = weight.quant_state
        second = state.state2
        key = state.shape, state.dtype
        if key not in self.launches:
            compiled, grid, arguments = first_launch(layer)
            self.launches[key] = compiled, grid, arguments[3], arguments[7:]
        compiled, grid, table, rest = self.launches[key]
        out = torch.empty(state.shape, dtype=state.dtype, device=weight.device)
        compiled[grid](weight, out, state.absmax, table, second.code, second.absmax, state.offset, *rest)
        return out


def allocate_and_launch(layer) -> Callable:
    """Return () -> weight that replays a launch without checks: what no call can cost less than."""
    tensors, values = launch._fields(layer.weight, layer.weight.quant_state)
    one = launch._make_launch(tensors, *launch._launch_plain(tensors, values))
    weight, absmax, *second = [x.data_ptr() for x in tensors]
    empty, run, stream = launch._empty_cuda, one.run, torch.cuda.current_stream().cuda_stream
    size, stride, dtype, grid, before = one.size, one.stride, one.dtype, one.grid, one.before
    after = absmax, one.table, *second, *one.after

    def call():
        out = empty(size, stride, dtype)
        run(grid, 1, 1, stream, *before, weight, out.data_ptr(), *after)
        return out

    call.keep = one, layer  # addresses keep nothing alive
    return call


def random_layers(shape, dtype, count: int) -> list[SimpleNamespace]:
    """Return `count` layers of random codes with the codebooks and the range of scales of a real one.

    shape: (out_features, in_features), in all a multiple of 64 elements. Each has contents of its own:
    `.weight`, uint8 (numel / 2, 1), with its bitsandbytes `.quant_state`, nested.
    """
    device, numel = default_device(), math.prod(shape)
    real = quantized_layer(4096, 256, dtype).weight.quant_state
    low, high = real.state2.absmax.aminmax()

    def random_bytes(*size):
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    layers = []
    for _ in range(count):
        weight, state = random_bytes(numel // 2, 1), copy.copy(real)
        state.shape, state.absmax, state.state2 = (
            torch.Size(shape),
            random_bytes(numel // 64),
            copy.copy(real.state2),
        )
        state.state2.absmax = torch.rand(-(-numel // 16384), device=device) * (high - low) + low
        weight.quant_state = state
        layers.append(SimpleNamespace(weight=weight))
    return layers


def why(error: BaseException) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def wrong(call: Callable[[], object], expected: torch.Tensor, out=None) -> str:
    """Return why call() does not return `expected` bit for bit, or write it into `out`; "" if it does.

    NaN goes first into `out`, else into the memory that a new result is likely to get, so that elements left
    unwritten show.
    """
    poison = torch.full_like(expected, math.nan) if out is None else out.fill_(math.nan)
    del poison
    try:
        result = call()
        clocks.synchronize()
        same = same_bits(result if out is None else out, expected)
    except Exception as error:  # also of a result that is no tensor
        return why(error)
    return "" if same else "not bit-identical to the reference: not timed"


def right(calls: dict[str, Callable], expected: torch.Tensor, problems: list[str]) -> dict[str, Callable]:
    """Return the calls whose result is `expected`, bit for bit; say of the others why not in `problems`."""
    kept = {}
    for name, call in calls.items():
        if reason := wrong(call, expected):
            problems.append(f"{name}: {reason}")
        else:
            kept[name] = call
    return kept
