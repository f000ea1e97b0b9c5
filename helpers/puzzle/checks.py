"""One cell for each of the puzzle's criteria beside speed, which prints what it saw; GPU time."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import collections

import torch

from helpers.names import LABELS
from helpers.puzzle.layers import (
    CONFIGS,
    LARGE,
    ON_GPU,
    SHORT,
    bnb_Linear4bit,
    every_code,
)
from helpers.puzzle.protocol import NEEDS_GPU, baselines, synchronize, wrong_elements
from nf4_triton.launch import CAN_RELAUNCH, launch_ordinary, launches, read
from nf4_triton.reference import dequantize_in_pytorch
from nf4_triton.settings import UnsupportedState, force, has_no_bf16, settings

# %% What the criteria share id="checks-tools" folded=true
import gc
import re

BACKEND = "inductor" if ON_GPU else "aot_eager"  # without a GPU the call is traced and runs interpreted
KERNEL = "_your_dequantize_nf4_kernel"
passed = globals().get("passed", {})  # {criterion: True, False, None}; kept when this cell runs again


def gpu_events(function, *arguments, count=3, first=False):
    """Profile `count` calls; return (name, microseconds) of everything they ran on the GPU.

    first: without a call before the profile.
    """
    if not first:
        function(*arguments)
    synchronize()
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            function(*arguments)
        synchronize()
    found = []
    for event in profile.events():  # annotations are ranges that torch.compile marks
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            found.append((event.name, event.time_range.elapsed_us()))
    return found


def gpu_us(function, layers):
    """Return the GPU time of a call in us. All results are kept, so that no two share memory."""
    events = gpu_events(lambda: [function(layer) for layer in layers])
    return sum(us for _, us in events) / len(layers) / 3


def some_layers(dtype):
    """Yield (description, layer)."""
    yield "every byte under every scale", every_code(dtype)
    for rows in (65, 4097):  # the kernel's last tile is partial
        yield f"{rows} x 64", bnb_Linear4bit(64, rows, dtype)
    for c in CONFIGS:
        yield f"{c.intermediate} x {c.hidden}", bnb_Linear4bit(c.hidden, c.intermediate, dtype)


def changes_show(candidate):
    """Change one value of each tensor in place: the next call must return the new weight."""
    layer = every_code(torch.float16)
    state, wrong = layer.weight.quant_state, {}
    tensors = {"weight": layer.weight.data, "absmax": state.absmax, "code2": state.state2.code}
    tensors |= {"absmax2": state.state2.absmax, "offset": state.offset}
    candidate(layer)
    for name, tensor in tensors.items():
        tensor.view(-1)[0] += 1
        wrong[name] = wrong_elements(candidate, layer)
    print("elements that differ after one value was changed in place:", wrong)
    return not any(wrong.values())


def another_state_raises(candidate):
    """Call with a state that is not double-quantized: this must raise UnsupportedState."""
    layer = bnb_Linear4bit(64, 64)
    layer.weight.quant_state.nested = False
    try:
        candidate(layer)
    except UnsupportedState as error:
        print("a state that is not double-quantized raises:", error)
        return True
    print("a state that is not double-quantized raises nothing")
    return False


def allocated(function, layer):
    """Return the bytes of a result, the peak of its call, and what stays. Raises if it waits for the GPU."""
    gc.collect()  # older garbage, freed during the call, would be counted
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        size = function(layer).nbytes
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return size, torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start


def own_launches(candidate, layer):
    """Empty the launch cache and call three times: the first call of a layer, then relaunches.

    Return ((name, us) of all that the GPU ran, the compiled kernels that the launch cache now holds).
    """
    with force(**vars(settings())):  # the same settings; this empties the cache
        events = gpu_events(candidate, layer, first=True)
        kernels = [compiled for known in launches.values() for *_, compiled in known]
    if not CAN_RELAUNCH:  # then every call is an ordinary launch
        kernels = [launch_ordinary(*read(layer.weight, layer.weight.quant_state), candidate(layer))]
    return events, kernels


def on_and_off(candidate, setting):
    """Run the candidate with a setting on and off; print its GPU time on 12 layers, more than an L2 cache.

    Return the PTX that it launched on and off, each "" if the GPU ran anything else or a bit was wrong.
    """
    layers = [bnb_Linear4bit(1024, 4096, torch.bfloat16) for _ in range(12)]
    chosen, found = vars(settings()), []
    for on in (True, False):
        with force(**(chosen | {setting: on})):
            events, kernels = own_launches(candidate, layers[0])
            wrong = wrong_elements(candidate, layers[0])
            us = gpu_us(candidate, layers)
        print(f"{setting}={on}: {us:.2f} us at 4096x1024 bf16, {wrong} wrong elements")
        only = {name for name, _ in events} == {KERNEL} and wrong == 0
        found.append("".join(kernel.asm["ptx"] for kernel in kernels) if only else "")
    return found


def only_when_on(pattern, on, off):
    """Print what matches in the PTX of a setting on; return whether something does, and nothing off."""
    used, left = re.findall(pattern, on), re.findall(pattern, off)
    for form, count in collections.Counter(re.sub(r"%\w+", "%", text) for text in used).items():
        print(f"{count} x {form}")
    print(f"switched off: {len(left)}")
    return bool(used and off and not left)


# %% id="single-kernel" call="passed['single_kernel'] = attempt(single_kernel, your_dequantize_nf4)"
def single_kernel(candidate):
    """Profile the first three calls of a layer: the GPU must run the kernel three times and nothing else."""
    right = True
    for dtype in SHORT:
        events, kernels = own_launches(candidate, bnb_Linear4bit(*LARGE, dtype))
        ran, kept = [name for name, _ in events], [kernel.name for kernel in kernels]
        print(f"{SHORT[dtype]}: the GPU ran {ran}; the launch cache holds {kept}")
        right = right and ran == [KERNEL] * 3 and {*kept} == {KERNEL}
    return right


# %% id="exact" call="passed['exact'] = attempt(exact, your_dequantize_nf4, gpu=False)"
def exact(candidate):
    """Count the elements that differ in any bit from bitsandbytes."""
    right = True
    print(f"{'elements that differ':28}{'fp16':>12}{'bf16':>12}{'of':>12}")
    for (description, fp16), (_, bf16) in zip(*map(some_layers, SHORT), strict=True):
        counts = [wrong_elements(candidate, layer) for layer in (fp16, bf16)]
        size = fp16.weight.quant_state.shape.numel()
        print(f"{description:28}{counts[0]:12,}{counts[1]:12,}{size:12,}")
        right = right and not any(counts)
    plain = [wrong_elements(dequantize_in_pytorch, every_code(dtype)) for dtype in SHORT]
    print(f"{'plain PyTorch (section 1)':28}{plain[0]:12,}{plain[1]:12,}")
    return all([right, changes_show(candidate), another_state_raises(candidate)])


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
        ran = [name for name, _ in gpu_events(function, layer, count=1)] if ON_GPU else []
        print("a call runs", *ran or [f"(not measured, needs {NEEDS_GPU})"])
        right = right and wrong == 0 and len(ran) == 1 and ran[0].startswith(KERNEL)
    return right if ON_GPU else None


# %% id="custom-asm" call="passed['custom_asm'] = attempt(custom_asm, your_dequantize_nf4)"
def custom_asm(candidate):
    """Print our inline assembly in the PTX that the candidate launches; with asm=False none is left."""
    on, off = on_and_off(candidate, "asm")
    return only_when_on(r"// begin inline asm\n\s*(.*mul\.rn.*)", on, off)  # Triton's own do not multiply


# %% id="cache-eviction" call="passed['cache_eviction'] = attempt(cache_eviction, your_dequantize_nf4)"
def cache_eviction(candidate):
    """Print loads and stores with a hint in the PTX that the candidate launches; none with hints=False."""
    on, off = on_and_off(candidate, "hints")
    return only_when_on(r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*", on, off)


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4)"
def memory(candidate):
    """Measure what the first call on a size allocates; torch raises an error if it waits for the GPU."""
    right = True
    for dtype in SHORT:
        candidate(bnb_Linear4bit(64, 64, dtype))  # compiles
        size, peak, kept = allocated(candidate, bnb_Linear4bit(*LARGE, dtype))
        print(f"{SHORT[dtype]}: {peak:,} bytes allocated for an output of {size:,}, {kept} kept; no waiting")
        right = right and peak == size and kept == 0
    return right


# %% GPU time at three sizes id="device" folded=true call="attempt(device, your_dequantize_nf4)"
def device(candidate):
    """Print the GPU time of a call at the three sizes of the puzzle's test, and the bandwidth in it."""
    contenders = {"ours": candidate, "plain": dequantize_in_pytorch}
    contenders |= {name: baselines()[name].fn for name in ("unsloth_today", "bitsandbytes")}
    for hidden, intermediate, dtype in sorted((c.hidden, c.intermediate, c.dtype) for c in CONFIGS):
        n = hidden * intermediate
        layers = [bnb_Linear4bit(hidden, intermediate, dtype) for _ in range(1 + 48 * 2**20 // n)]
        print(f"{intermediate}x{hidden} {SHORT[dtype]}, {len(layers)} layers: more than an L2 cache holds")
        for name, function in contenders.items():
            if function:
                us = gpu_us(function, layers)
                print(f"    {LABELS[name]:16}{us:8.1f} us   {2.516e-3 * n / us:6.0f} GB/s")
