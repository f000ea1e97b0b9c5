"""Calls from other processes, on other streams and GPUs, and in a CUDA graph (more: puzzle/test_turns.py)."""

import functools
import textwrap

import pytest
import torch

import processes
from nf4_triton.core import launch, launch_general
from states import right

pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu


@pytest.fixture(params=["puzzle", "general"])
def room(request, make_layer):
    """(make, call): for the puzzle's layers and launch path, and for flat layers and the general kernel."""
    nested = request.param == "puzzle"
    if nested:
        return make_layer, launch.your_dequantize_nf4
    return functools.partial(make_layer, nested=False), by_general


def by_general(layer):
    return launch_general.dequantize_weight(layer.weight, layer.weight.quant_state)


# Processes
def run(code, **variables):
    """Run `code`, which can use `cases`, `call`, and `same`. Return its output."""
    head = """
        from helpers import machine; machine.prepare()
        import torch
        from nf4_triton.core import launch_general
        import sys; sys.path.append("tests/nf4_triton")
        import states
        cases = [((64, 96), torch.float16, nested) for nested in (True, False)]  # for both kernels
        cases = lambda given=cases: [states.random_state(*case) for case in given]
        call = launch_general.dequantize_weight
        def same(): return all(states.exact(call(*case), *case) for case in 2 * cases())
    """
    done = processes.python(["-c", textwrap.dedent(head) + textwrap.dedent(code)], variables=variables)
    return done.out + done.err


def test_worker_processes():
    """Forked before anything has used CUDA, as by data loaders and launchers."""
    code = """
        import multiprocessing, os, sys
        def worker(queue): queue.put("exact" if same() else "wrong")
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=worker, args=(queue,))
        process.start()
        print("fork", queue.get())
        process.join(60)
        print("ended with", process.exitcode)
    """
    # Without NVML, torch would count GPUs by starting CUDA, which does not survive a fork.
    said = run(code, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert "fork exact" in said and "ended with 0" in said, said


@ON_GPU
def test_devices_that_appear_after_the_import():
    """Ray and vLLM set CUDA_VISIBLE_DEVICES after the import."""
    code = """
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print("exact", same())
    """
    assert "exact True" in run(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")


# CUDA graphs, streams, GPUs
@ON_GPU
def test_the_first_call_of_a_process_inside_a_capture():
    """A kernel cannot always be loaded during a capture. Then the call raises an error, and later calls
    work."""
    code = """
        for case in cases():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    result = call(*case)
                result.fill_(float("nan"))
                graph.replay()
                print("captured", states.exact(result, *case))
            except RuntimeError as error:
                print("refused:", error)
        print("after it", same())
    """
    said = run(code)
    assert said.count("captured True") + said.count("refused: ") == 2 and "after it True" in said, said


@ON_GPU
def test_on_the_current_stream(room):
    """A weight written on a side stream after a long wait there: only work on that stream sees it."""
    make, call = room
    layer = make(2048, 2048, torch.float16)
    call(layer)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            layer.weight.data.bitwise_xor_(255)
            result = call(layer)
        stream.synchronize()
        assert right(result, layer)


@ON_GPU
@pytest.mark.parametrize("current", [0, 1])
def test_it_runs_where_the_tensors_are(room, current):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make, call = room
    layers = [make(512, 256, torch.bfloat16, device=f"cuda:{i}", seed=i) for i in range(2)]
    compiled = torch.compile(lambda layer: call(layer), fullgraph=True)
    with torch.cuda.device(current):
        for _ in range(3):
            for layer in layers:
                for function in (call, compiled):
                    result = function(layer)
                    assert result.device == layer.weight.device and right(result, layer)
                    assert torch.cuda.current_device() == current
