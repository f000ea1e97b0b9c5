"""One cell for each of the puzzle's criteria beside speed, which prints what it saw; GPU time."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import collections
import gc

import torch

from helpers.puzzle.layers import (
    CONFIGS,
    LARGE,
    ON_GPU,
    SHORT,
    bnb_Linear4bit,
)
from helpers.puzzle.protocol import NEEDS_GPU, allocated, synchronize, wrong_elements
from nf4_triton.core.kernel import _your_dequantize_nf4_kernel
from nf4_triton.core.launch import CAN_RELAUNCH, launch_ordinary, launches, prepare, read
from nf4_triton.core.reference import dequantize_in_pytorch
from nf4_triton.core.settings import force, has_no_bf16, settings

# %% What the criteria share id="checks-tools" folded=true
import re

BACKEND = "inductor" if ON_GPU else "aot_eager"  # without a GPU the call is traced and runs interpreted
KERNEL = "_your_dequantize_nf4_kernel"
passed = globals().get("passed", {})  # {criterion: True, False, None}; kept when this cell runs again


def gpu_events(function, *arguments, count=3):
    """Profile `count` calls; return the names of everything they ran on the GPU."""
    synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(count):
            function(*arguments)
        synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.is_user_annotation]  # ranges that torch.compile marks


def own_launches(candidate, layer):
    """Empty the launch cache and call three times. Return what the GPU ran, and the kernels that are kept."""
    with force(**vars(settings())):  # the same settings; this empties the cache
        ran = gpu_events(candidate, layer)
        kernels = [compiled for known in launches.values() for *_, compiled in known]
    if not CAN_RELAUNCH:  # then every call is an ordinary launch
        grid, arguments, options = prepare(*read(layer.weight, layer.weight.quant_state), candidate(layer))
        kernels = [launch_ordinary(_your_dequantize_nf4_kernel, grid, arguments, options)]
    return ran, kernels


def only_when_on(candidate, setting, pattern):
    """Turn a setting on, then off; print what `pattern` finds in the candidate's PTX: nothing when off."""
    layer, chosen, right = bnb_Linear4bit(1024, 4096, torch.bfloat16), vars(settings()), True
    for on in (True, False):
        with force(**(chosen | {setting: on})):
            ran, kernels = own_launches(candidate, layer)
            wrong = wrong_elements(candidate, layer)
        found = re.findall(pattern, "".join(kernel.asm["ptx"] for kernel in kernels))
        print(f"{setting}={on}: {wrong} wrong elements, {len(found)} found in the PTX")
        for form, count in collections.Counter(re.sub(r"%\w+", "%", text) for text in found).items():
            print(f"    {count} x {form}")
        right = right and bool(kernels) and {*ran} == {KERNEL} and wrong == 0 and bool(found) == on
    return right


# %% id="single-kernel" call="passed['single_kernel'] = attempt(single_kernel, your_dequantize_nf4)"
def single_kernel(candidate):
    """Profile the first three calls of a layer: the GPU must run the kernel three times and nothing else."""
    right = True
    for dtype in SHORT:
        ran, kernels = own_launches(candidate, bnb_Linear4bit(*LARGE, dtype))
        kept = [kernel.name for kernel in kernels]
        print(f"{SHORT[dtype]}: the GPU ran {ran}; the launch cache holds {kept}")
        right = right and ran == [KERNEL] * 3 and {*kept} == {KERNEL}
    return right


# %% id="exact" call="passed['exact'] = attempt(exact, your_dequantize_nf4, gpu=False)"
def exact(candidate):
    """Count the elements that differ in any bit from bitsandbytes after every tensor was changed in place."""
    right = True
    print(f"{'elements that differ':28}{'fp16':>12}{'bf16':>12}{'plain PyTorch':>16}{'of':>12}")
    # The kernel's last tile is partial with 65 and with 4097 rows.
    for rows, columns in [(65, 64), (4097, 64), *((c.intermediate, c.hidden) for c in CONFIGS)]:
        counts = []
        for dtype in SHORT:
            layer = bnb_Linear4bit(columns, rows, dtype)
            candidate(layer)
            for tensor in read(layer.weight.data, layer.weight.quant_state)[0]:
                if tensor.dtype == torch.uint8:
                    tensor.random_(256)  # from 4.2M elements on, every byte meets every scale
                else:
                    tensor.mul_(1.25)
            counts.append(wrong_elements(candidate, layer))
        plain = wrong_elements(dequantize_in_pytorch, layer)
        print(f"{f'{rows} x {columns}':28}{counts[0]:12,}{counts[1]:12,}{plain:16,}{rows * columns:12,}")
        right = right and not any(counts)
    return right


# %% id="compile" call="passed['torch_compile'] = attempt(torch_compile, your_dequantize_nf4, gpu=False)"
def torch_compile(candidate):
    """Compile for fp16 and bf16; print graphs, wrong elements, and what a compiled call runs."""
    right, counters = True, torch._dynamo.utils.counters
    for dtype in SHORT:
        torch._dynamo.reset()
        counters.clear()
        layer = bnb_Linear4bit(*LARGE, dtype)
        # On a T4 bf16 runs eagerly.
        fullgraph = dtype == torch.float16 or not has_no_bf16(layer.weight.device)
        function = torch.compile(candidate, fullgraph=fullgraph, backend=BACKEND)
        wrong, graphs = wrong_elements(function, layer), counters["stats"]["unique_graphs"]
        print(f"{SHORT[dtype]}: fullgraph={fullgraph}, {graphs} graph, {wrong} elements differ", end="; ")
        ran = gpu_events(function, layer, count=1) if ON_GPU else []
        print("a call runs", *ran or [f"(not measured, needs {NEEDS_GPU})"])
        right = right and wrong == 0 and len(ran) == 1 and ran[0].startswith(KERNEL)
    return right if ON_GPU else None


# %% id="custom-asm" call="passed['custom_asm'] = attempt(custom_asm, your_dequantize_nf4)"
def custom_asm(candidate):
    """Print our inline assembly in the PTX that the candidate launches; with asm=False none is left."""
    return only_when_on(candidate, "asm", r"// begin inline asm\n\s*(.*mul\.rn.*)")  # Triton's do not


# %% id="cache-eviction" call="passed['cache_eviction'] = attempt(cache_eviction, your_dequantize_nf4)"
def cache_eviction(candidate):
    """Print loads and stores with a hint in the PTX that the candidate launches; none with hints=False."""
    return only_when_on(candidate, "hints", r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*")


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4)"
def memory(candidate):
    """Count what eleven calls allocate and keep; torch raises an error if one waits for the GPU."""
    right = True
    for dtype in SHORT:
        small, large = bnb_Linear4bit(64, 64, dtype), bnb_Linear4bit(*LARGE, dtype)
        gc.collect()
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for layer in [small, *[large] * 10]:
                size = candidate(layer).nbytes
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peak, kept = allocated("peak") - before, allocated() - before
        print(f"{SHORT[dtype]}: {peak:,} bytes allocated for a result of {size:,}, {kept:,} kept; no waiting")
        right = right and peak == size and kept == 0
    return right
