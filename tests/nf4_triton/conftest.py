"""Kept launches for the tests of the launch path.

Without a GPU nothing is kept, so Triton's interpreter stands in for the compiled kernel: it reads and writes
at the addresses given, as a GPU would. A stale address, layout, or setting gives wrong bits in both.
"""

import contextlib
import ctypes
import threading

import pytest
import torch

from nf4_triton import launch, launch_general
from states import exact


class Watched:
    """Calls of a launch room, each with whether a kept launch was used."""

    def __init__(self, module, monkeypatch):
        self.module = module
        self.call = getattr(module, "dequantize_weight", None) or module._your_dequantize_nf4
        self.checked = 0  # calls for which no kept launch fit
        name = "launch_first" if module is launch_general else "check_and_launch"
        first = getattr(module, name)

        def count(*arguments):
            self.checked += 1
            return first(*arguments)

        monkeypatch.setattr(module, name, count)

    def __call__(self, *arguments):
        """Return (result, whether it was launched again)."""
        before = self.checked
        result = self.call(*arguments)
        return result, self.checked == before

    def check(self, weight, state, *out):
        """Fail if the result is not exact. Return whether it was launched again."""
        result, relaunched = self(weight, state, *out)
        assert exact(result, weight, state)
        return relaunched

    def warm(self, layer):
        """Call until a kept launch is used. Return (weight, state)."""
        weight, state = layer.weight, layer.weight.quant_state
        self.check(weight, state)
        assert self.check(weight, state)
        return weight, state


@pytest.fixture
def watch(device, monkeypatch):
    """watch(module): that launch room as Watched, with nothing kept."""
    with contextlib.ExitStack() as after:

        def start(module):
            if device == "cuda" and not module.CAN_RELAUNCH:
                pytest.skip("this Triton launches the ordinary way: nothing is kept")
            for table in (launch.launches, launch_general.launches_with):
                table.clear()
                after.callback(table.clear)
            if device == "cpu":
                interpret({module, launch, launch_general}, monkeypatch)
            return Watched(module, monkeypatch)

        yield start


@pytest.fixture(params=[launch, launch_general], ids=["puzzle", "general"])
def watched(request, watch):
    """Each launch room as Watched: the puzzle's alone, and the package's entry on top of it."""
    return watch(request.param)


@pytest.fixture
def general(watch):
    """The package's entry as Watched."""
    return watch(launch_general)


@pytest.fixture
def layer(watched, make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level. FP4 for the package's own kernel."""
    quant_type = "nf4" if watched.module is launch else "fp4"
    return make_layer(64, 320, torch.bfloat16, quant_type=quant_type)


@pytest.fixture(params=[False, True], ids=["first", "warm"])
def case(request, watched, layer):
    """(watched, plain weight, state), before and after a launch was kept."""
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    if request.param:
        watched.check(weight, state)
        assert watched.check(weight, state)
    return watched, weight, state


@pytest.fixture(scope="module")
def own_bitsandbytes():
    """Skip where Unsloth, imported in this process, has changed bitsandbytes and transformers."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if functional.dequantize_4bit.__module__ != functional.__name__:
        pytest.skip("Unsloth changed other libraries in this process: run this folder by itself")


ONE_AT_A_TIME = threading.Lock()  # the interpreter is not made for threads


class Interpreted:
    """What the interpreter lacks: a compiled kernel whose run(...) takes addresses."""

    def __init__(self, kernel, arguments):
        self.kernel, self.name = kernel, kernel.fn.__name__
        self.like = [(x.dtype, x.numel()) for x in arguments if isinstance(x, torch.Tensor)]

    def run(self, grid, y, z, stream, *arguments):
        tensors = []
        for address, (dtype, numel) in zip(arguments, self.like, strict=False):
            if address:
                content = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
                tensors.append(torch.frombuffer(content, dtype=dtype))
            else:  # not read
                tensors.append(torch.empty(0, dtype=dtype))
        with ONE_AT_A_TIME:
            self.kernel[(grid,)](*tensors, *arguments[len(tensors) :], num_warps=4)


def interpret(rooms, monkeypatch):
    """Give launch rooms what they take from CUDA: an allocator, a stream, a compiled kernel."""
    launch_ordinary = launch.launch_ordinary

    def launch_and_compile(kernel, grid, arguments, options):
        with ONE_AT_A_TIME:
            launch_ordinary(kernel, grid, arguments, options)
        return Interpreted(kernel, arguments)

    def empty(shape, stride, dtype):
        return torch.full(shape, float("nan"), dtype=dtype).as_strided(shape, stride)

    for room in rooms:
        monkeypatch.setattr(room, "launch_ordinary", launch_and_compile, raising=False)
        monkeypatch.setattr(room, "launcher", lambda compiled, version: (compiled.run, ()))
        monkeypatch.setattr(room, "empty_cuda", empty)
        monkeypatch.setattr(room, "current_stream", lambda index: 0)
        monkeypatch.setattr(room, "current_device", lambda: -1)  # of a tensor on the CPU
        monkeypatch.setattr(room, "CAN_RELAUNCH", True)
