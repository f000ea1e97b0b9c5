"""One cell for each of the puzzle's criteria beside speed, which prints what it saw; GPU time."""

# ruff: noqa: E402, E501, I001
# %% tags=["module-only"]
import collections
import contextlib
import gc

import torch

from helpers.puzzle.layers import (
    CONFIGS,
    LARGE,
    ON_GPU,
    SHORT,
    bnb_Linear4bit,
)
from helpers.puzzle.protocol import (
    NEEDS_GPU,
    NEEDS_HOOK,  # noqa: F401  in the cells' calls
    SMALL,
    allocated,
    loaded_kernels,
    synchronize,
    wrong_elements,
)
from nf4_triton.core.launch import read_nested
from nf4_triton.core.reference import dequantize_in_pytorch
from nf4_triton.core.settings import force, has_no_bf16, settings

# %% What the criteria share id="checks-tools" folded=true
import re
import warnings

passed = globals().get("passed", {})  # {criterion: True, False, None}; kept when this cell runs again


def profiled(function, layer):
    """Profile a call. Return the names of all that it ran on the GPU, and its result's wrong elements."""
    ran = []

    def call(layer):
        synchronize()
        with torch.profiler.profile() as profile:
            result = function(layer)
            synchronize()
        for event in profile.events():
            # torch.compile marks ranges, and .item() copies to the host.
            if event.device_type.name == "CUDA" and not event.is_user_annotation and "DtoH" not in event.name:
                ran.append(event.name)
        return result

    return ran, wrong_elements(call, layer)


def loaded(ran):
    """Return the files of each kernel of these names that Triton loaded under the settings in force.

    Returns [] unless Triton loaded all that ran.
    """
    found = [(name, files) for name, then, files in loaded_kernels if then == vars(settings())]
    return [files for name, files in found if name in ran] if {*ran} <= {name for name, _ in found} else []


def only_when_on(candidate, setting, find):
    """Print what find(files) finds in each kernel that the candidate launches with a setting on, then off.

    It must find nothing when off. Another author's kernel has no such setting: nothing is loaded when off.
    """
    layer, chosen, right = bnb_Linear4bit(1024, 4096, torch.bfloat16), vars(settings()), True
    for on in (True, False):
        with force(**(chosen | {setting: on})):
            candidate(layer)  # a first call may autotune
            ran, wrong = profiled(candidate, layer)
            kernels = loaded(ran)
        print(f"{setting}={on}: {wrong} wrong elements; found in the PTX of", *ran)
        right = right and wrong == 0 and (not on or kernels != [])
        for files in kernels:
            found = collections.Counter(re.sub(r"%\w+", "%", text) for text in find(files))
            dtypes = {*re.findall(r"ptr<(b?f16)>", files[".ttgir"].read_text())}
            print("   ", *dtypes, dict(found) or "nothing")
            right = right and bool(found) == on
    return right


def count_waits(candidate, layers):
    """Call a candidate on each layer. Return how often torch warned that a call waited for the GPU."""
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        for layer in layers:
            candidate(layer)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


# %% id="single-kernel" call="passed['single_kernel'] = attempt(single_kernel, your_dequantize_nf4, NEEDS_HOOK)"
def single_kernel(candidate):
    """Profile three calls. The first may autotune; the others must run one Triton kernel alone."""
    right = True
    for dtype in SHORT:
        layer = bnb_Linear4bit(*LARGE, dtype)
        for call in (1, 2, 3):
            ran, wrong = profiled(candidate, layer)
            print(f"{SHORT[dtype]}, call {call}: {wrong} wrong elements; ran", dict(collections.Counter(ran)))
            right = right and (call == 1 or len(ran) == 1 and wrong == 0 and len(loaded(ran)) > 0)
    return right


# %% id="exact" call="passed['exact'] = attempt(exact, your_dequantize_nf4)"
def exact(candidate):
    """Count the elements that differ in any bit from bitsandbytes after every tensor was changed in place."""
    print(f"{'elements that differ':28}{'fp16':>12}{'bf16':>12}{'plain PyTorch':>16}{'of':>12}")
    wrong = []
    # The kernel's last tile is partial with 65 and with 4097 rows.
    for rows, columns in [(65, 64), (4097, 64), *((c.intermediate, c.hidden) for c in CONFIGS)]:
        for dtype in SHORT:
            layer = bnb_Linear4bit(columns, rows, dtype)
            candidate(layer)
            for tensor in read_nested(layer.weight.data, layer.weight.quant_state)[0]:  # bytes and scales
                tensor.random_(256) if tensor.dtype == torch.uint8 else tensor.mul_(1.25)
            wrong.append(wrong_elements(candidate, layer))
        plain = wrong_elements(dequantize_in_pytorch, layer)
        print(f"{f'{rows} x {columns}':28}{wrong[-2]:12,}{wrong[-1]:12,}{plain:16,}{rows * columns:12,}")
    return not any(wrong)


# %% id="compile" call="passed['torch_compile'] = attempt(torch_compile, your_dequantize_nf4)"
def torch_compile(candidate):
    """Compile for fp16 and bf16. A compiled call must run one kernel, and none that Inductor wrote."""
    right, backend = True, "inductor" if ON_GPU else "aot_eager"
    for dtype in SHORT:
        torch._dynamo.reset()
        layer = bnb_Linear4bit(*LARGE, dtype)
        # On a T4 bf16 runs eagerly; without a GPU the call is traced and runs interpreted.
        fullgraph = dtype == torch.float16 or not has_no_bf16(layer.weight.device)
        function = torch.compile(candidate, fullgraph=fullgraph, backend=backend)
        wrong = wrong_elements(function, layer)
        ran = profiled(function, layer)[0] if ON_GPU else [f"(not measured, needs {NEEDS_GPU})"]
        print(f"{SHORT[dtype]}: fullgraph={fullgraph}, {wrong} elements differ; ran", *ran)
        right = right and wrong == 0 and len(ran) == 1 and not ran[0].startswith("triton_")
    return right if ON_GPU or not right else print(f"not measured (needs {NEEDS_GPU})")


# %% id="custom-asm" call="passed['custom_asm'] = attempt(custom_asm, your_dequantize_nf4, NEEDS_HOOK)"
def custom_asm(candidate):
    """Find the author's inline assembly in the PTX that the candidate launches; Triton adds its own."""

    def written(files):  # the author's is in Triton's first form (TTIR), with $0 in place of a register
        texts = re.findall(r'tt\.elementwise_inline_asm "(?:\\0A|\s)*([^"\\]+)', files[".ttir"].read_text())
        form = "|".join(re.sub(r"\\\$\d+", r"[^,; ]+", re.escape(text)) for text in {*texts})
        return re.findall(form, files[".ptx"].read_text()) if form else []

    return only_when_on(candidate, "asm", written)


# %% id="cache-eviction" call="passed['cache_eviction'] = attempt(cache_eviction, your_dequantize_nf4, NEEDS_HOOK)"
def cache_eviction(candidate):
    """Find loads and stores with an eviction hint in the PTX that the candidate launches."""
    hint = re.compile(r"\b(?:ld|st)\.global\S*(?:evict_|\.cs)\S*")
    return only_when_on(candidate, "hints", lambda files: hint.findall(files[".ptx"].read_text()))


# %% id="memory" call="passed['memory'] = attempt(memory, your_dequantize_nf4, NEEDS_GPU)"
def memory(candidate):
    """Count the bytes that calls keep, and those they allocate after each layer's first; print waits."""
    layers = [bnb_Linear4bit(*size, dtype) for size in ((64, 64), LARGE) for dtype in SHORT]
    gc.collect()
    before = allocated()
    size = max(candidate(layer).nbytes for layer in layers)  # the first calls may autotune
    torch.cuda.reset_peak_memory_stats()
    waits = count_waits(candidate, 10 * layers)
    peak, kept = allocated("peak") - before, allocated() - before
    print(f"{peak:,} bytes allocated for a result of {size:,}, {kept:,} kept; the calls waited {waits} times")
    return 0 <= peak - size <= SMALL and kept <= SMALL
