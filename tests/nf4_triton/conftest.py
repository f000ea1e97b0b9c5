"""Replayed launches for the tests of the launch path.

Without a GPU nothing is replayed, so Triton's interpreter stands in for the compiled kernel: it reads and
writes at the addresses given, as a GPU would. A stale address, layout, or setting gives wrong bits in both.
"""

import contextlib
import ctypes
import threading

import pytest
import torch

from nf4_triton import replay
from states import exact


class Watched:
    """Calls of a launch module, each with whether a cached launch was replayed."""

    def __init__(self, module, monkeypatch):
        self.module = module
        self.checked = 0  # calls for which no cached launch fit
        check_and_launch = module.check_and_launch

        def count(*arguments):
            self.checked += 1
            return check_and_launch(*arguments)

        monkeypatch.setattr(module, "check_and_launch", count)

    def __call__(self, weight, state, out=None):
        """Return (result, whether it was replayed)."""
        before = self.checked
        result = self.module._your_dequantize_nf4(weight, state, out)
        return result, self.checked == before

    def check(self, weight, state, out=None):
        """Fail if the result is not exact. Return whether it was replayed."""
        result, replayed = self(weight, state, out)
        assert exact(result, weight, state)
        return replayed

    def warm(self, layer):
        """Call until a launch is replayed. Return (weight, state)."""
        weight, state = layer.weight, layer.weight.quant_state
        self.check(weight, state)
        assert self.check(weight, state)
        return weight, state


@pytest.fixture
def watch(device, monkeypatch):
    """watch(module): that launch module as Watched, with an empty launch cache."""
    with contextlib.ExitStack() as after:

        def start(module):
            if device == "cuda" and not replay.CAN_REPLAY:
                pytest.skip("this Triton launches the ordinary way: nothing is replayed")
            place = module if hasattr(module, "CachedLaunch") else replay  # one module has all cells
            place.cached.clear()
            after.callback(place.cached.clear)
            if device == "cpu":
                interpret(module, place, monkeypatch)
            return Watched(module, monkeypatch)

        yield start


@pytest.fixture
def watched(watch):
    """The launch module as Watched."""
    from nf4_triton import launch

    return watch(launch)


@pytest.fixture
def own_bitsandbytes():
    """Skip where Unsloth, imported in this process, has replaced bitsandbytes' functions."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if functional.dequantize_4bit.__module__ != functional.__name__:
        pytest.skip("Unsloth replaced bitsandbytes' functions in this process: run this folder by itself")


ONE_AT_A_TIME = threading.Lock()  # the interpreter is not made for threads


class Interpreted:
    """What the interpreter lacks: a compiled kernel whose run(...) takes addresses."""

    function = packed_metadata = None

    def __init__(self, kernel, pointers):
        self.kernel = kernel
        self.like = [(tensor.dtype, tensor.numel()) for tensor in pointers]

    def run(self, grid, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        tensors = []
        for address, (dtype, numel) in zip(arguments, self.like, strict=False):
            content = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
            tensors.append(torch.frombuffer(content, dtype=dtype))
        with ONE_AT_A_TIME:
            self.kernel[(grid,)](*tensors, *arguments[len(tensors) :], num_warps=4)


def interpret(module, place, monkeypatch):
    """Give the interpreter what a replay takes from CUDA: an allocator, a stream, a compiled kernel."""
    launch_ordinary = module.launch_ordinary

    def launch_and_compile(packed, out=None, selection=None):
        with ONE_AT_A_TIME:
            launched = launch_ordinary(packed, out, selection)
        if not launched.grid:
            return launched
        compiled = Interpreted(module._your_dequantize_nf4_kernel, launched.pointers)
        return launched._replace(compiled=compiled)

    def empty(shape, stride, dtype):
        return torch.full(shape, float("nan"), dtype=dtype).as_strided(shape, stride)

    monkeypatch.setattr(module, "launch_ordinary", launch_and_compile)
    monkeypatch.setattr(module, "empty_cuda", empty)
    monkeypatch.setattr(module, "current_stream", lambda index: 0)
    monkeypatch.setattr(module, "current_device", lambda: -1)  # of a tensor on the CPU
    for one in {module, place}:
        monkeypatch.setattr(one, "CAN_REPLAY", True)
    monkeypatch.setattr(place, "SKIP_PYTHON_LAUNCHER", False)
