"""Replayed launches for the tests of the launch path.

Without a GPU nothing is replayed, so the interpreter stands in for the launch: it reads and writes at the
addresses given, as the GPU would. A stale address, layout or setting gives wrong bits in both.
"""

import contextlib
import ctypes
import sys
import threading

import pytest
import torch

from helpers.nf4 import reference


class Watched:
    """A launch module with an empty launch cache. Counts its first calls and its eager calls out of compiled
    code."""

    def __init__(self, module, monkeypatch):
        self.module = module
        self.first = self.eager = 0  # calls past the cached launches; compiled calls that did not launch
        first_call, run = module._first_call, module._run

        def count_first(*arguments):
            self.first += 1
            return first_call(*arguments)

        def count_eager(*arguments):
            self.eager += 1
            return run(*arguments)

        monkeypatch.setattr(module, "_first_call", count_first)
        monkeypatch.setattr(module, "_run", count_eager)

    def __call__(self, weight, state, out=None):
        """Return (result, whether a cached launch gave it)."""
        before = self.first
        result = self.module._your_dequantize_nf4(weight, state, out)
        return result, self.first == before

    def warm(self, layer):
        """Call until a cached launch is replayed, check both results, return (weight, state)."""
        weight, state = layer.weight, layer.weight.quant_state
        for _ in range(2):
            result, replayed = self(weight, state)
            assert exact(result, weight, state)
        assert replayed
        return weight, state


def exact(result, weight, state):
    return reference.same_bits(result, reference.dequantize(weight, state))


@pytest.fixture
def watch(device, monkeypatch):
    """watch(module): that launch module as Watched."""

    def start(module):
        if device == "cuda" and not module.DIRECT:
            pytest.skip("this Triton launches the ordinary way: nothing is replayed")
        settings = sys.modules[module.settings.__module__]  # kernel.py, whose force() empties them
        for owner in (module, settings):
            monkeypatch.setattr(owner, "launches", launches)
            monkeypatch.setattr(owner, "compiled_launches", compiled_launches)
        watched = Watched(module, monkeypatch)
        if device == "cpu":
            interpret(module, monkeypatch)
            forced.enter_context(
                module.force(words_small=32)
            )  # one program, which takes the interpreter least
        return watched

    launches, compiled_launches = Launches(), {}
    with contextlib.ExitStack() as forced:
        yield start


class Launches(dict):
    """Compiled code names the CPU None, a tensor there -1."""

    def get(self, key, default=None):
        return super().get((*key[:-1], -1 if key[-1] is None else key[-1]), default)


@pytest.fixture
def own_bitsandbytes():
    """Skip where Unsloth, imported in this process, has replaced bitsandbytes' functions."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if functional.dequantize_4bit.__module__ != functional.__name__:
        pytest.skip("Unsloth replaced bitsandbytes' functions in this process: run tests/nf4 by itself")


@pytest.fixture
def watched(watch):
    """The launch module as Watched."""
    from helpers.nf4 import launch

    return watch(launch)


class Interpreted:
    """What Triton's interpreter lacks: a compiled kernel whose run(...) takes addresses."""

    global_scratch_size = profile_scratch_size = 1  # not to be launched past `run`
    packed_metadata, function = (4, 1, 0), None
    one_at_a_time = threading.Lock()

    def __init__(self, module, arguments, constexprs):
        self.kernel, self.options = module._your_dequantize_nf4_kernel, dict(num_warps=4)
        self.dtypes = [x.dtype for x in arguments[:7]]
        self.sizes = [x.numel() for x in arguments[:7]]
        self.names = list(constexprs)
        self.run = self  # as an attribute of a CompiledKernel

    def __call__(self, grid, y, z, stream, function, metadata, launch_metadata, enter, exit_, *arguments):
        addresses, sizes, constexprs = arguments[:7], arguments[7:9], arguments[9:]
        tensors = map(memory, addresses, self.dtypes, self.sizes)
        launch = self.kernel[(grid,)]
        with self.one_at_a_time:
            launch(*tensors, *sizes, **dict(zip(self.names, constexprs, strict=True)), **self.options)


def memory(address, dtype, numel):
    content = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype)


def interpret(module, monkeypatch):
    """Give the interpreter what a replayed launch takes from CUDA: an allocator, a stream, a launch."""
    launch_plain = module._launch_plain

    def launch_and_compile(tensors, values, out=None):
        with Interpreted.one_at_a_time:
            result, _, grid, arguments, constexprs, _ = launch_plain(tensors, values, out)
        compiled = Interpreted(module, arguments, constexprs) if grid else None
        return result, compiled, grid, arguments, constexprs, 0

    monkeypatch.setattr(module, "_launch_plain", launch_and_compile)
    monkeypatch.setattr(module, "_empty_cuda", empty)
    monkeypatch.setattr(module, "_stream", lambda index: 0)
    monkeypatch.setattr(module, "_current_device", lambda: -1)  # of a tensor on the CPU
    monkeypatch.setattr(module, "DIRECT", True)


def empty(shape, stride, dtype):
    return torch.full(shape, float("nan"), dtype=dtype).as_strided(shape, stride)
