"""Repeated launches, as the tests of plans need them.

Without a GPU no plan is made, so the interpreter stands in for the repeated launch: it reads and
writes at the addresses given, as the GPU would. A stale plan gives stale bits in both.
"""

import ctypes
import threading

import pytest
import torch
import triton


class Planned:
    """The kernel with its plans in use, and how many calls went past a plan."""

    def __init__(self, kernel):
        self.kernel, self.unplanned = kernel, 0
        self.first_call = kernel._first_call

    def count(self, *arguments):
        self.unplanned += 1
        return self.first_call(*arguments)

    def __call__(self, weight, state):
        """(result, whether a plan gave it)"""
        before = self.unplanned
        result = self.kernel._your_dequantize_nf4(weight, state)
        return result, self.unplanned == before


@pytest.fixture
def planned_kernel(device, monkeypatch):
    """planned_kernel(module): that kernel module as Planned."""

    def plan(module):
        if device == "cuda" and not module.DIRECT:
            pytest.skip(f"Triton {triton.__version__} launches on its public path: no plans")
        planned = Planned(module)
        monkeypatch.setattr(module, "_plans", {})
        monkeypatch.setattr(module, "_kinds", {})
        monkeypatch.setattr(module, "_first_call", planned.count)
        if device == "cpu":
            interpret(module, monkeypatch)
        return planned

    return plan


@pytest.fixture
def planned(kernel, planned_kernel):
    return planned_kernel(kernel)


def interpret(kernel, monkeypatch):
    """Give the interpreter what a repeated launch takes from CUDA: an allocator, a stream, a launch."""
    launch_once, last, one_at_a_time = kernel._launch, threading.local(), threading.Lock()

    def empty(shape, stride, dtype):
        return torch.full(shape, float("nan"), dtype=dtype).as_strided(shape, stride)

    def memory(address, like):
        content = (ctypes.c_uint8 * like.nbytes).from_address(address)
        return torch.frombuffer(content, dtype=like.dtype).view(like.shape)

    def launch(*arguments):
        last.arguments = arguments
        return launch_once(*arguments)

    def repeat(compiled, grid, arguments, constexprs, limit):
        jit, _, _, _, settings = last.arguments
        seen = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]

        def again(stream, *addresses):
            table, *sizes = seen[3], *seen[7:]
            like = [*seen[:3], *seen[4:7]]
            weight, out, absmax, *second = map(memory, addresses, like)
            launch = jit[(grid,)]
            with one_at_a_time:
                launch(weight, out, absmax, table, *second, *sizes, **constexprs, **kernel._options(settings))

        return again

    monkeypatch.setattr(kernel, "_empty_cuda", empty)
    monkeypatch.setattr(kernel, "_stream", lambda index: 0)
    monkeypatch.setattr(kernel, "_launch", launch)
    monkeypatch.setattr(kernel, "_repeat", repeat)
    monkeypatch.setattr(kernel, "DIRECT", True)
