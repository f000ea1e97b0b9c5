"""Who calls: bitsandbytes, PEFT, Unsloth, accelerate, FSDP, other threads, streams, processes and GPUs."""

import textwrap

import pytest
import torch

from helpers import machine
from nf4_triton import launch
from states import right

pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu


# Libraries
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("storage", [torch.uint8, torch.int8, torch.float32, torch.float64])
def test_fsdp_gathers_and_frees_a_weight_for_each_use(watched, make_layer, storage, start):
    """As FSDP1 with quant_storage: the weight is a view of a flat parameter that is freed after each use.
    Its address is then the view's offset, not 0."""
    layer = make_layer(64, 96, torch.bfloat16)
    packed = layer.weight.data.as_subclass(torch.Tensor).view(-1).view(storage)
    flat = torch.cat([packed[:start], packed])
    layer.weight.data, values = flat[start:], flat.clone()
    size = flat.untyped_storage().nbytes()
    for turn in range(3):
        assert watched.check(layer.weight, layer.weight.quant_state) == (turn > 0)
        flat.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(launch.UnsupportedState, match="weight has no memory.*gather it first"):
                launch.your_dequantize_nf4(layer)
        flat.untyped_storage().resize_(size)
        flat.copy_(values)


# Processes
def run(code, **variables):
    """Run `code` with `make` and `same` at hand; return what it printed."""
    head = """
        from helpers import machine; machine.prepare()
        import torch
        from nf4_triton import launch
        import sys; sys.path.append("tests/nf4_triton")
        import states
        def make(seed=0): return states.random_state((64, 96), torch.float16, seed=seed)
        def same(case):
            results = [launch._your_dequantize_nf4(*case) for _ in range(2)]
            return all(states.exact(result, *case) for result in results)
    """
    done = machine.python(["-c", textwrap.dedent(head) + textwrap.dedent(code)], variables=variables)
    return done.out + done.err


def test_worker_processes():
    """As data loaders and launchers start theirs: before anything has used CUDA."""
    code = """
        import multiprocessing, os, sys
        def worker(queue): queue.put("exact" if same(make()) else "wrong")
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=worker, args=(queue,))
        process.start()
        print("fork", queue.get())
        process.join(60)
        print("ended with", process.exitcode)
    """
    # Without NVML torch would count GPUs by starting CUDA, which does not survive a fork.
    said = run(code, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert "fork exact" in said and "ended with 0" in said, said


@ON_GPU
def test_devices_that_appear_after_the_import():
    """Ray and vLLM set CUDA_VISIBLE_DEVICES after it."""
    code = """
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print("exact", same(make()))
    """
    assert "exact True" in run(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")


# CUDA graphs, streams, GPUs
@ON_GPU
@pytest.mark.parametrize("warm", [1, 3])
def test_a_captured_graph_follows_its_weights(make_layer, warm):
    layers = [make_layer(512, 256 * (i + 1), torch.float16, seed=i) for i in range(3)]
    for _ in range(warm):
        for layer in layers:
            launch.your_dequantize_nf4(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [launch.your_dequantize_nf4(layer) for layer in layers]
    for _ in range(2):
        for result, layer in zip(results, layers, strict=True):
            result.fill_(float("nan"))
            layer.weight.data.bitwise_xor_(255)
            layer.weight.quant_state.absmax.bitwise_xor_(255)
            layer.weight.quant_state.offset.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(right, results, layers))


@ON_GPU
def test_the_first_call_of_a_process_inside_a_capture():
    """A kernel cannot always be loaded during a capture: then there is an error, and later calls work."""
    code = """
        case, graph = make(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = launch._your_dequantize_nf4(*case)
            result.fill_(float("nan"))
            graph.replay()
            print("captured", states.exact(result, *case))
        except RuntimeError as error:
            print("refused:", error)
        print("after it", same(case))
    """
    said = run(code)
    assert ("captured True" in said or "refused: " in said) and "after it True" in said, said


@ON_GPU
def test_on_the_current_stream(make_layer):
    """A weight written on a side stream after a long wait there: only work on that stream sees it."""
    layer = make_layer(2048, 2048, torch.float16)
    launch.your_dequantize_nf4(layer)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            layer.weight.data.bitwise_xor_(255)
            result = launch.your_dequantize_nf4(layer)
        stream.synchronize()
        assert right(result, layer)


@ON_GPU
@pytest.mark.parametrize("current", [0, 1])
def test_it_runs_where_the_tensors_are(make_layer, current):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layers = [make_layer(512, 256, torch.bfloat16, device=f"cuda:{i}", seed=i) for i in range(2)]
    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer), fullgraph=True)
    with torch.cuda.device(current):
        for _ in range(3):
            for layer in layers:
                for call in (launch.your_dequantize_nf4, compiled):
                    result = call(layer)
                    assert result.device == layer.weight.device and right(result, layer)
                    assert torch.cuda.current_device() == current
