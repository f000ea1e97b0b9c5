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
    bitsandbytes_baseline,
    dequantize_in_pytorch,
    synchronize,
)
from nf4_triton.launch import launch_ordinary
from nf4_triton.reference import dequantize, different
from nf4_triton.settings import force, settings
from nf4_triton.state import read_state

# %% A kernel that only moves the bytes, and the chart id="move-bytes" folded=true
import statistics

import triton
import triton.language as tl

COLORS = {
    "this kernel": "#0B63CE",
    "Unsloth today": "#C2410C",
    "bitsandbytes": "#2E7D32",
    "plain PyTorch": "#9A6700",
}
MOVES = "only moves the bytes"


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


def move_bytes(layer):
    """Read a layer's codes and absmax, write as many bytes as its 16-bit weight has; return these."""
    words, absmax = layer.weight.data.view(-1).view(torch.int32), layer.weight.quant_state.absmax
    out = torch.empty(4 * len(words), dtype=torch.int32, device=words.device)
    grid = (triton.cdiv(len(words), 1024),)
    _move_bytes_kernel[grid](words, absmax, out, len(words), TILE=1024, num_warps=8)
    return out


def draw(us):
    """Draw how fast each contender is relative to moving the bytes. us: {contender: {size: us}}."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 3.6), layout="constrained", facecolor="white")
    for i, (name, color) in enumerate(COLORS.items()):
        times = us.get(name, {})
        shares = [us[MOVES][size] / times[size] for size in times]
        bars = panel.bar([group + 0.2 * i for group in range(len(times))], shares, 0.19, color=color)
        bars.set_label(name)
        panel.bar_label(bars, [f"{time:.3g}" for time in times.values()], fontsize=9)
    panel.set_xticks([group + 0.3 for group in range(len(us[MOVES]))], us[MOVES])
    panel.set(ylabel="speed relative to moving the bytes", title="Labels: GPU time of a call in us")
    panel.axhline(1, color="#1F2328", linestyle="--")
    figure.legend(loc="outside lower center", ncols=4)
    plt.show()


# %% Profile calls: the name and GPU time of everything they run id="gpu-events" folded=true
def gpu_events(function, *arguments, count=3):
    """Profile `count` calls; return (name, microseconds) of everything they ran on the GPU."""
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


# %% GPU time at three sizes, drawn id="device" folded=true call="attempt(device, your_dequantize_nf4)"
def device(candidate):
    """Print and draw the GPU time of a call at the three sizes of the puzzle's test."""
    known = baselines()
    contenders = {MOVES: move_bytes, "this kernel": candidate, "Unsloth today": known["unsloth_today"].fn}
    contenders |= {"bitsandbytes": known["bitsandbytes"].fn, "plain PyTorch": dequantize_in_pytorch}
    us = {name: {} for name, function in contenders.items() if function}
    for config in sorted(CONFIGS, key=lambda config: config.hidden):
        size = f"{config.intermediate}x{config.hidden} {SHORT[config.dtype]}"
        count = 1 + 48 * 2**20 // (config.hidden * config.intermediate)  # more than an L2 cache holds
        layers = [quantized_layer(config.hidden, config.intermediate, config.dtype) for _ in range(count)]
        for name, times in us.items():
            times[size] = gpu_us(contenders[name], layers)
    print(f"{'GPU time of a call, us':24}", *(f"{size:>18}" for size in us[MOVES]))
    for name, times in us.items():
        print(f"{name:24}", *(f"{time:18.1f}" for time in times.values()))
    draw(us)


# %% What the cells below share id="checks-tools" folded=true
import collections
import contextlib
import math
import re

HALF = (torch.float16, torch.bfloat16)
BACKEND = "inductor" if ON_GPU else "aot_eager"  # without a GPU the call is traced and runs interpreted
KERNEL = "_your_dequantize_nf4_kernel"
passed = {}  # {criterion: True, False, or None where it was not measured}


def by_bitsandbytes(layer):
    """Return the weight by bitsandbytes' own function."""
    return bitsandbytes_baseline().fn(layer)


def by_pytorch(layer):
    """Return the weight by the reference in plain PyTorch."""
    return dequantize(read_state(layer.weight, layer.weight.quant_state))


def wrong_elements(function, layer, reference=by_bitsandbytes):
    """Count the elements whose bits differ from the reference's."""
    expected = reference(layer)
    torch.full_like(expected, math.nan)  # freed at once, so the result is likely to get this memory
    return different(function(layer), expected)


def some_layers():
    """Yield (description, function of a dtype that returns a layer)."""
    yield "every byte under every scale", every_code
    for columns in (1, 65, 4097):  # sizes that end in the middle of a byte, a block, a program
        yield f"1 x {columns}", lambda dtype, columns=columns: quantized_layer(columns, 1, dtype)
    for config in CONFIGS:
        shape = config.hidden, config.intermediate
        yield f"{shape[1]} x {shape[0]}", lambda dtype, shape=shape: quantized_layer(*shape, dtype)


def changes_show(candidate):
    """Change one value of each tensor in place: the next call must return the new weight."""
    layer = quantized_layer(128, 256, torch.float16)
    weight, state = layer.weight.data, layer.weight.quant_state
    right = True
    print("one value changed in place, elements changed in the next call", end="")
    for name, tensor in {"weight": weight, "absmax": state.absmax, "absmax2": state.state2.absmax}.items():
        before = candidate(layer).clone()
        tensor.view(-1)[0] += 1
        changed = different(candidate(layer), before)
        print(f"; {name}: {changed}", end="")
        right = right and changed > 0 and wrong_elements(candidate, layer) == 0
    print()
    return right


def inductor_compiles(dtype):
    """Reset Dynamo; return whether Inductor compiles this dtype on this card."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if not ON_GPU or dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False):
        return True
    print("Inductor does not compile bf16 on this card, so the call runs eagerly:")
    return False


@contextlib.contextmanager
def no_waiting():
    """Inside this block torch raises an error where the CPU waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def our_opcodes(ptx):
    """Return the opcodes of the kernel's inline assembly. Its blocks have mul.rn.ftz, Triton's own do not."""
    opcodes = {}
    for block in re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S):
        if "mul.rn.ftz" in block:
            opcodes |= dict.fromkeys(re.findall(r"[;{]\s*([a-z]+\.[a-z0-9.]+)", block))
    return list(opcodes)


# %% id="single-kernel" call="passed['one kernel'] = attempt(single_kernel, your_dequantize_nf4)"
def single_kernel(candidate):
    """Profile three calls: the GPU must run the kernel three times and nothing else."""
    layer = quantized_layer(*LARGE, torch.bfloat16)
    events = gpu_events(candidate, layer, count=3)
    for name in dict.fromkeys(name for name, _ in events):
        times = [us for other, us in events if other == name]
        print(f"{len(times)} launches in 3 calls, {statistics.mean(times):.1f} us each: {name}")
    return [name for name, _ in events] == [KERNEL] * 3


# %% id="exact" call="passed['bits'] = attempt(exact, your_dequantize_nf4, needs_gpu=False)"
def exact(candidate):
    """Count the elements that differ in any bit from plain PyTorch and from bitsandbytes."""
    columns = ("fp16: PyTorch", "bitsandbytes", "bf16: PyTorch", "bitsandbytes", "of")
    print(f"{'elements that differ from':28}", *(f"{column:>13}" for column in columns))
    right = True
    for description, make in some_layers():
        counts = []
        for layer in map(make, HALF):
            counts += [wrong_elements(candidate, layer, fx) for fx in (by_pytorch, by_bitsandbytes)]
        size = layer.weight.quant_state.shape.numel()
        print(f"{description:28}", *(f"{count:13,}" for count in (*counts, size)))
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


# %% Run with a setting on and off: the PTX that ran, wrong elements, GPU time id="on-and-off" folded=true
def on_and_off(candidate, setting):
    """Run with a setting on and off. Return ({on: PTX that ran}, {on: wrong elements}).

    Print the GPU time of both, on 12 layers, more than the L2 cache holds.
    """
    layers = [quantized_layer(1024, 4096, torch.bfloat16) for _ in range(12)]
    chosen, ptx, wrong, times = vars(settings()), {}, {}, {}
    for on in (True, False):
        with force(**(chosen | {setting: on and chosen[setting]})):
            first = launch_ordinary(read_state(layers[0].weight, layers[0].weight.quant_state))
            ptx[on], wrong[on] = first.compiled.asm["ptx"], wrong_elements(candidate, layers[0])
            events = gpu_events(lambda: [candidate(layer) for layer in layers])
            times[on] = statistics.median(us for _, us in events)
    print(f"4096x1024 bf16, {setting} on: {times[True]:.2f} us, {wrong[True]} wrong elements;", end=" ")
    print(f"off: {times[False]:.2f} us, {wrong[False]} wrong elements")
    return ptx, wrong


# %% id="custom-asm" call="passed['assembly'] = attempt(custom_asm, your_dequantize_nf4)"
def custom_asm(candidate):
    """Count the assembly's instructions in the PTX that ran, with it and without. The bits stay the same."""
    ptx, wrong = on_and_off(candidate, "asm")
    counts = {}
    for opcode in our_opcodes(ptx[True]):
        counts[opcode] = [len(re.findall(rf"\b{opcode}\b", ptx[on])) for on in (True, False)]
        print(f"{opcode:20}{counts[opcode][0]:4} in the PTX with asm,{counts[opcode][1]:4} without")
    used, left = counts.get("mul.rn.ftz.f32", (0, 0))
    return used > 0 and left == 0 and not any(wrong.values())


# %% id="cache-eviction" call="passed['eviction'] = attempt(cache_eviction, your_dequantize_nf4)"
def cache_eviction(candidate):
    """Print the loads and stores with a hint in the PTX that ran. Without hints: none, and the same bits."""
    ptx, wrong = on_and_off(candidate, "hints")
    hinted = r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*"
    with_hints, without = (re.findall(hinted, ptx[on]) for on in (True, False))
    for form, count in collections.Counter(with_hints).items():
        print(f"{count:3} x {form}")
    print(f"with hints off: {len(without)}")
    return len(with_hints) > 0 and not without and not any(wrong.values())


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4)"
def memory(candidate):
    """Measure what a call on a new layer allocates; torch raises an error if it waits for the GPU."""
    right = True
    for dtype in HALF:
        first, layer = (quantized_layer(*LARGE, dtype) for _ in range(2))
        candidate(first)  # compiles
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with no_waiting():
            size = candidate(layer).nbytes
        peak, kept = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
        print(f"{SHORT[dtype]}: {peak:,} bytes allocated for an output of {size:,}, {kept} kept; no waiting")
        right = right and peak == size and kept == 0
    return right
