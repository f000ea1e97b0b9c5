"""GPU time, and one cell for each of the puzzle's criteria beside speed: it prints what it saw."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.puzzle.layers import LARGE, ON_GPU, every_code, quantized_layer
from helpers.puzzle.protocol import (
    CONFIGS,
    NEEDS_GPU,
    SHORT,
    baselines,
    synchronize,
    wrong_elements,
)
from nf4_triton.launch import CAN_RELAUNCH, launch_ordinary, launches, read
from nf4_triton.reference import dequantize_in_pytorch
from nf4_triton.settings import force, settings

# %% A kernel that moves the bytes and does no math id="move-bytes" folded=true

import triton
import triton.language as tl


@triton.jit
def _move_bytes_kernel(words_ptr, absmax_ptr, out_ptr, n_words, TILE: tl.constexpr):
    """Write each word four times: a dequantization reads 8 codes in a word and writes 8 results."""
    # max_contiguous: a word's results stay with their thread, as one 128-bit store
    index = tl.program_id(0) * TILE + tl.max_contiguous(tl.arange(0, TILE), 1)
    exists = index < n_words
    word = tl.load(words_ptr + index, mask=exists, other=0)
    word ^= tl.load(absmax_ptr + (index >> 3), mask=exists, other=0)  # one absmax for 64 codes
    words = tl.reshape(tl.join(tl.join(word, word), tl.join(word, word)), (TILE, 4))
    to = index[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + to, words, mask=exists[:, None], cache_modifier=".cs")


def move_bytes(layer, tile=1024, num_warps=8):
    """Read a layer's codes and absmax, write as many bytes as its 16-bit weight has; return these.

    tile: words that a program reads.
    """
    words, absmax = layer.weight.data.view(-1).view(torch.int32), layer.weight.quant_state.absmax
    out = torch.empty(4 * len(words), dtype=torch.int32, device=words.device)
    grid = (triton.cdiv(len(words), tile),)
    _move_bytes_kernel[grid](words, absmax, out, len(words), TILE=tile, num_warps=num_warps)
    return out


# %% Profile calls: the name and GPU time of everything they run id="gpu-events" folded=true
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


# %% GPU time at three sizes id="device" folded=true call="attempt(device, your_dequantize_nf4)"
def device(candidate):
    """Print the GPU time of a call at the three sizes of the puzzle's test."""
    known, layers = baselines(), {}
    for hidden, intermediate, dtype in sorted((c.hidden, c.intermediate, c.dtype) for c in CONFIGS):
        count = 1 + 48 * 2**20 // (hidden * intermediate)  # more than an L2 cache holds
        shape = f"{intermediate}x{hidden} {SHORT[dtype]}"
        layers[shape] = [quantized_layer(hidden, intermediate, dtype) for _ in range(count)]
    contenders = {"copy": move_bytes, "this kernel": candidate, "Unsloth today": known["unsloth_today"].fn}
    contenders |= {"bitsandbytes": known["bitsandbytes"].fn, "plain PyTorch": dequantize_in_pytorch}
    print(f"{'GPU time of a call, us':24}", *(f"{shape:>18}" for shape in layers))
    for name, function in contenders.items():
        if function:
            print(f"{name:24}", *(f"{gpu_us(function, group):18.1f}" for group in layers.values()))


# %% What the cells below share id="checks-tools" folded=true
import collections
import re

HALF = (torch.float16, torch.bfloat16)
BACKEND = "inductor" if ON_GPU else "aot_eager"  # without a GPU the call is traced and runs interpreted
KERNEL = "_your_dequantize_nf4_kernel"
passed = globals().get("passed", {})  # {criterion: True, False, None}; kept when this cell runs again


def some_layers(dtype):
    """Yield (description, layer)."""
    yield "every byte under every scale", every_code(dtype)
    for columns in (1, 65, 4097):  # sizes that end in the middle of a byte, a block, a program
        yield f"1 x {columns}", quantized_layer(columns, 1, dtype)
    for config in CONFIGS:
        hidden, intermediate = config.hidden, config.intermediate
        yield f"{intermediate} x {hidden}", quantized_layer(hidden, intermediate, dtype)


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


def inductor_compiles(dtype):
    """Reset Dynamo; return whether Inductor compiles this dtype on this card."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if not ON_GPU or dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False):
        return True
    print("Inductor does not compile bf16 on this card, so the call runs eagerly:")
    return False


def allocated(function, layer):
    """Return the bytes of a result, the peak of its call, and what stays. Raises if it waits for the GPU."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        size = function(layer).nbytes
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return size, torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start


def own_launches(candidate, layer):
    """Empty the launch cache and call three times: the first call of a layer, then replays.

    Return ((name, us) of all that the GPU ran, the compiled kernels that the launch cache now replays).
    """
    with force(**vars(settings())):  # the same settings; this empties the cache
        events = gpu_events(candidate, layer, first=True)
        kernels = [kept.owner for known in launches.values() for kept in known]
    if not CAN_RELAUNCH:  # then every call is an ordinary launch
        tensors, layout = read(layer.weight, layer.weight.quant_state)
        kernels = [launch_ordinary(tensors, layout, candidate(layer))]
    return events, kernels


def on_and_off(candidate, setting):
    """Run the candidate with a setting on and off; print its GPU time on 12 layers, more than an L2 cache.

    Return the PTX that it launched on and off, each "" if the GPU ran anything else or a bit was wrong.
    """
    layers = [quantized_layer(1024, 4096, torch.bfloat16) for _ in range(12)]
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


def our_assembly(ptx):
    """Count the inline assembly that multiplies: Triton's own blocks, its loads and stores, do not."""
    blocks = re.findall(r"// begin inline asm\n\s*(.*?)\s*// end inline asm", ptx, re.S)
    return collections.Counter(re.sub(r"%\w+", "%", block) for block in blocks if "mul.rn" in block)


# %% id="single-kernel" call="passed['one kernel'] = attempt(single_kernel, your_dequantize_nf4)"
def single_kernel(candidate):
    """Profile the first three calls of a layer: the GPU must run the kernel three times and nothing else."""
    right = True
    for dtype in HALF:
        events, kernels = own_launches(candidate, quantized_layer(*LARGE, dtype))
        ran, kept = [name for name, _ in events], [kernel.name for kernel in kernels]
        print(f"{SHORT[dtype]}: the GPU ran {ran}; the launch cache replays {kept}")
        right = right and ran == [KERNEL] * 3 and {*kept} == {KERNEL}
    return right


# %% id="exact" call="passed['bits'] = attempt(exact, your_dequantize_nf4, needs_gpu=False)"
def exact(candidate):
    """Count the elements that differ in any bit from bitsandbytes."""
    right = True
    print(f"{'elements that differ':28}{'fp16':>12}{'bf16':>12}{'of':>12}")
    for (description, fp16), (_, bf16) in zip(*map(some_layers, HALF), strict=True):
        counts = [wrong_elements(candidate, layer) for layer in (fp16, bf16)]
        size = fp16.weight.quant_state.shape.numel()
        print(f"{description:28}{counts[0]:12,}{counts[1]:12,}{size:12,}")
        right = right and not any(counts)
    return changes_show(candidate) and right


# %% id="compile" call="passed['compile'] = attempt(torch_compile, your_dequantize_nf4, needs_gpu=False)"
def torch_compile(candidate):
    """Compile for fp16 and bf16; print graphs, wrong elements, and what a compiled call runs."""
    right = True
    for dtype in HALF:
        layer, fullgraph = quantized_layer(*LARGE, dtype), inductor_compiles(dtype)
        function = torch.compile(candidate, fullgraph=fullgraph, backend=BACKEND)
        wrong = wrong_elements(function, layer)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"{SHORT[dtype]}: fullgraph={fullgraph}, {graphs} graph, {wrong} elements differ", end="; ")
        ran = [name for name, _ in gpu_events(function, layer, count=1)] if ON_GPU else []
        print("a call runs", *ran or [f"(not measured, needs {NEEDS_GPU})"])
        right = right and wrong == 0 and len(ran) == 1 and ran[0].startswith(KERNEL)
    return right if ON_GPU else None


# %% id="custom-asm" call="passed['assembly'] = attempt(custom_asm, your_dequantize_nf4)"
def custom_asm(candidate):
    """Print our inline assembly in the PTX that the candidate launches; with asm=False none is left."""
    on, off = on_and_off(candidate, "asm")
    used, left = our_assembly(on), our_assembly(off)
    for block, count in used.items():
        print(f"{count} x {block}")
    print(f"with asm=False: {sum(left.values())}")
    return bool(used and off and not left)


# %% id="cache-eviction" call="passed['eviction'] = attempt(cache_eviction, your_dequantize_nf4)"
def cache_eviction(candidate):
    """Print loads and stores with a hint in the PTX that the candidate launches; none with hints=False."""
    on, off = on_and_off(candidate, "hints")
    hinted = r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*"
    used, left = re.findall(hinted, on), re.findall(hinted, off)
    for form, count in collections.Counter(used).items():
        print(f"{count} x {form}")
    print(f"with hints=False: {len(left)}")
    return bool(used and off and not left)


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4)"
def memory(candidate):
    """Measure what a call on a new layer allocates; torch raises an error if it waits for the GPU."""
    right = True
    for dtype in HALF:
        candidate(quantized_layer(*LARGE, dtype))  # compiles
        size, peak, kept = allocated(candidate, quantized_layer(*LARGE, dtype))
        print(f"{SHORT[dtype]}: {peak:,} bytes allocated for an output of {size:,}, {kept} kept; no waiting")
        right = right and peak == size and kept == 0
    return right
