"""A notebook cell for each of the puzzle's criteria except speed; each prints what it saw."""

# ruff: noqa: E402, E501, I001
# %% tags=["module-only"]
import collections
import gc

import torch
import triton

from helpers.puzzle.layers import (
    CONFIGS,
    LARGE,
    SHORT,
    bnb_Linear4bit,
)
from helpers.puzzle.protocol import (
    NEEDS_GPU,  # noqa: F401  in the cells' calls
    SMALL,
    allocated,
    synchronize,
    wrong_elements,
)
from nf4_triton.core.reference import dequantize_in_pytorch
from nf4_triton.core.settings import has_no_bf16

# %% What the criteria share id="checks-tools" folded=true
import re
from unittest import mock

passed = globals().get("passed", {})  # {criterion: True, False, None}; kept when this cell runs again


def profiled(function, layer):
    """Profile a call; return the names of what it ran on the GPU, and how many elements are wrong."""
    ran = []

    def call(layer):
        synchronize()
        with torch.profiler.profile() as profile:
            result = function(layer)
            synchronize()
        # torch.compile marks ranges, and .item() copies to the host.
        events = [e for e in profile.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        ran.extend(event.name for event in events if "DtoH" not in event.name)
        return result

    return ran, wrong_elements(call, layer)


def triton_kernels():
    """Return all of this process's kernels that Triton compiled, each a CompiledKernel."""
    return [one for one in gc.get_objects() if type(one) is triton.compiler.CompiledKernel]


def found_in_launched(candidate, find):
    """Print what find(asm) finds in the kernels that a call in each dtype launches. Return whether it does.

    asm: {"ttir": text, "ptx": text, ...} of a CompiledKernel. Wrong elements fail.
    """
    hook, wrong, found = mock.Mock(), 0, collections.Counter()
    hooked = mock.patch.object(triton.knobs.runtime, "launch_enter_hook", hook)(candidate)
    for dtype in SHORT:
        layer = bnb_Linear4bit(*LARGE, dtype)
        candidate(layer)  # a first call may autotune
        wrong += wrong_elements(hooked, layer)
    handles = [facts.get()["function"] for (facts,), _ in hook.call_args_list]
    print(f"{wrong} wrong elements; Triton launched {len(handles)} kernels for fp16 and bf16:")
    for kernel in triton_kernels():
        if kernel.function in handles:
            texts = collections.Counter(re.sub(r"%\w+", "%", text) for text in find(kernel.asm))
            print(f"    {kernel.name}:", dict(texts) or "nothing")
            found += texts
    return wrong == 0 and bool(found)


# %% id="single-kernel" call="passed['single_kernel'] = attempt(single_kernel, your_dequantize_nf4, NEEDS_GPU)"
def single_kernel(candidate):
    """Profile a layer's second call, which must run only one kernel, Triton's. The first may autotune."""
    right = True
    for dtype in SHORT:
        layer = bnb_Linear4bit(*LARGE, dtype)
        candidate(layer)
        ran, wrong = profiled(candidate, layer)
        print(f"{SHORT[dtype]}: {wrong} wrong elements; ran", dict(collections.Counter(ran)))
        right = right and wrong == 0 and ran in [[kernel.name] for kernel in triton_kernels()]
    return right


# %% id="exact" call="passed['exact'] = attempt(exact, your_dequantize_nf4)"
def exact(candidate):
    """Count the elements that differ in any bit from bitsandbytes after all codes and scales changed."""
    print(f"{'elements that differ':28}{'fp16':>12}{'bf16':>12}{'plain PyTorch':>16}{'of':>12}")
    wrong = []
    # The kernel's last tile is partial with 65 and with 4097 rows.
    for rows, columns in [(65, 64), (4097, 64), *((c.intermediate, c.hidden) for c in CONFIGS)]:
        for dtype in SHORT:
            layer = bnb_Linear4bit(columns, rows, dtype)
            candidate(layer)
            wrong.append(wrong_elements(candidate, layer))
        plain = wrong_elements(dequantize_in_pytorch, layer)
        print(f"{f'{rows} x {columns}':28}{wrong[-2]:12,}{wrong[-1]:12,}{plain:16,}{rows * columns:12,}")
    return not any(wrong)


# %% id="compile" call="passed['torch_compile'] = attempt(torch_compile, your_dequantize_nf4, NEEDS_GPU)"
def torch_compile(candidate):
    """Compile for fp16 and bf16. A compiled call must run one kernel, and none that Inductor wrote."""
    right = True
    for dtype in SHORT:
        torch._dynamo.reset()
        layer = bnb_Linear4bit(*LARGE, dtype)
        fullgraph = dtype == torch.float16 or not has_no_bf16(layer.weight.device)  # eager on a T4
        function = torch.compile(candidate, fullgraph=fullgraph)
        function(layer)
        ran, wrong = profiled(function, layer)
        print(f"{SHORT[dtype]}: fullgraph={fullgraph}, {wrong} wrong elements; ran", *ran)
        right = right and wrong == 0 and len(ran) == 1 and not ran[0].startswith("triton_")
    return right


# %% id="custom-asm" call="passed['custom_asm'] = attempt(custom_asm, your_dequantize_nf4, NEEDS_GPU)"
def custom_asm(candidate):
    """Find the author's inline assembly in the PTX that the candidate launches; Triton adds its own."""

    def written(asm):  # TTIR, Triton's first IR, has the author's assembly, with $0 instead of a register
        texts = re.findall(r'tt\.elementwise_inline_asm "(?:\\0A|\s)*([^"\\]+)', asm["ttir"])
        form = "|".join(re.sub(r"\\\$\d+", r"[^,; ]+", re.escape(text)) for text in {*texts})
        return re.findall(form, asm["ptx"]) if form else []

    return found_in_launched(candidate, written)


# %% id="cache-eviction" call="passed['cache_eviction'] = attempt(cache_eviction, your_dequantize_nf4, NEEDS_GPU)"
def cache_eviction(candidate):
    """Find loads and stores with an eviction hint in the PTX that the candidate launches."""
    hint = re.compile(r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*")
    return found_in_launched(candidate, lambda asm: hint.findall(asm["ptx"]))


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4, NEEDS_GPU)"
def memory(candidate):
    """Count the bytes that calls keep, and those that they allocate after each layer's first call."""
    layers = [bnb_Linear4bit(*size, dtype) for size in ((64, 64), LARGE) for dtype in SHORT]
    gc.collect()
    before = allocated()
    size = max(candidate(layer).nbytes for layer in layers)  # the first calls may autotune
    torch.cuda.reset_peak_memory_stats()
    for layer in layers:
        candidate(layer)
    peak, kept = allocated("peak") - before, allocated() - before
    print(f"{peak:,} bytes allocated for a result of {size:,}, {kept:,} kept")
    return 0 <= peak - size <= SMALL and kept <= SMALL
