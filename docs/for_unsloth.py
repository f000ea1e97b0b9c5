"""Try for_unsloth.patch on a copy of the installed Unsloth: compare the bits, print times before and after.

python docs/for_unsloth.py    (needs a GPU; the installed package stays as it is)
"""

import collections
import concurrent.futures
import contextlib
import copy
import functools
import gc
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import triton

PATCH = Path(__file__).with_name("for_unsloth.patch")
B200 = (1024, 2, True, True, 2)  # Unsloth's settings for more than 65,536 bytes
PUZZLE = ((torch.float16, 2048, 8192), (torch.bfloat16, 1024, 4096), (torch.bfloat16, 4096, 14336))


def patched_copy(folder):
    """Copy the installed package into a folder and patch the copy. Return the installed kernels' folder."""
    spec = importlib.util.find_spec("unsloth")
    if spec is None:
        sys.exit("Not tried: Unsloth is not installed")
    package = Path(spec.origin).parent
    shutil.copytree(package, folder / "unsloth")
    for part in PATCH.read_text().split("--- a/")[1:]:
        name, _, *patch = part.splitlines()
        try:
            lines = inserted((folder / name).read_text().splitlines(), patch)
        except ValueError as error:
            sys.exit(f"Not tried: the patch is for Unsloth 2026.10.9, not for this {name} ({error})")
        (folder / name).write_text("\n".join(lines) + "\n")
    return package / "kernels"


def inserted(lines, patch):
    """Return a file's lines with those of a patch. Raises ValueError if a context line differs."""
    at = 0
    for line in patch:
        if line.startswith("@@"):
            at = int(line.split("+")[1].split(",")[0]) - 1
            continue
        if line.startswith("+"):
            lines.insert(at, line[1:])
        elif lines[at : at + 1] != [line[1:]]:
            raise ValueError(f"line {at + 1} differs")
        at += 1
    return lines


def unpatched_function(utils):
    """Return fast_dequantize of the installed utils.py, loaded beside the patched copy's."""
    spec = importlib.util.spec_from_file_location("unsloth.kernels.utils_today", utils)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fast_dequantize


def linear4bit(out_features, in_features, dtype, nested=True):
    """Return a Linear4bit with a random weight in NF4."""
    from bitsandbytes.nn import Linear4bit

    how = {"bias": False, "compute_dtype": dtype, "quant_type": "nf4", "compress_statistics": nested}
    layer = Linear4bit(in_features, out_features, **how).to("cuda")
    layer.weight.quant_state.dtype = dtype
    return layer


def side_stream():
    """Return a context on another stream than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def changes(weight, state):
    """Yield the weight and state of a layer after each change that a launch must notice."""
    flip = functools.partial(torch.flip, dims=(0,))
    replaced = [(state, "absmax", flip), (state, "code", flip), (state, "shape", lambda old: old[::-1])]
    replaced.append((state, "dtype", lambda old: torch.float32))
    if state.nested:
        replaced += [(state.state2, "absmax", flip), (state.state2, "code", flip)]
        replaced.append((state, "offset", lambda old: old + 1))
    for owner, name, change in replaced:
        old = getattr(owner, name)
        setattr(owner, name, change(old))
        yield weight, state
        setattr(owner, name, old)
    for tensor in (state.absmax, weight.data):
        tensor.copy_(flip(tensor))
        yield weight, state
    weight.data = flip(weight.data)  # other memory
    yield weight, state
    yield torch.cat([weight.data[:1], weight.data])[1:], state  # misaligned
    if state.nested:  # as old versions of bitsandbytes had it
        nested = [state.offset, [state.state2.absmax, state.state2.code, state.state2.blocksize]]
        listed = [state.absmax, state.shape, state.dtype, state.blocksize, nested, "nf4", state.code]
        yield weight, listed


def compare(check, launcher):
    """Call check(weight, state, buffer) in the states that torch can be in, then after changes."""
    hooks = triton.knobs.runtime.launch_enter_hook  # profilers add to it
    places = [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        side_stream,
        lambda: mock.patch.object(hooks, "calls", [lambda *_: None]),
        lambda: mock.patch.object(launcher, "_ENABLED", False),
    ]
    if torch.cuda.device_count() > 1:
        places.append(lambda: torch.cuda.device(1))
    for dtype in (torch.float16, torch.bfloat16):
        for nested in (True, False, True):  # a layer is likely to get the memory of the one before
            weight = linear4bit(320, 64, dtype, nested).weight
            state = weight.quant_state
            for place in places:
                with place():
                    for form in (weight, weight.t(), weight.data):
                        check(form, state, True)
                torch.cuda.synchronize()
            for changed in changes(weight, state):
                check(*changed, False)  # its own plan for the buffer does not compare all of these
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for done in [pool.submit(check, weight, state, False) for _ in range(50)]:
                    done.result()
            assert getattr(copy.deepcopy(state), "_unsloth_nf4_fresh", None) is None, "a copy has the plan"


def compare_graphs(today, patched):
    """Compare a call that a CUDA graph captures, and one that torch.compile traces."""
    weight = linear4bit(320, 64, torch.bfloat16).weight
    state = weight.quant_state
    patched(weight, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = patched(weight, state)
    weight.data.copy_(weight.data.flip(0))
    graph.replay()
    assert torch.equal(result, today(weight, state)), "a CUDA graph has other bits"
    x = torch.randn(8, 64, dtype=torch.bfloat16, device="cuda")

    def product(call):
        return torch.compile(lambda x: x @ call(weight, state).t())(x)

    assert torch.equal(product(today), product(patched)), "compiled code has other bits"


def kept_bytes(call):
    """Return the bytes that stay after a layer's W and W.t() were dequantized, and the layer deleted."""
    counts = []
    for _ in range(2):  # the second time, what is allocated once is there
        layer = linear4bit(1024, 1024, torch.bfloat16)
        for weight in (layer.weight, layer.weight.t()):
            call(weight, layer.weight.quant_state)
        del layer, weight
        gc.collect()
        counts.append(torch.cuda.memory_allocated())
    return counts[1] - counts[0]


def timed(call, count):
    """Return the microseconds until one of `count` calls returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    us = 1e6 * (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    return us


def medians(calls, count, rounds):
    """Return {name: median microseconds}. The calls take turns, in changing order."""
    us = collections.defaultdict(list)
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            us[name].append(timed(calls[name], count))
    return {name: statistics.median(values) for name, values in us.items()}


def until_return(contenders, form, **how):
    """Return {name: microseconds until a call returns} for W (1024x4096, bf16) or what form() makes of it."""
    weight = linear4bit(1024, 4096, torch.bfloat16).weight
    calls = {}
    for name, call in contenders.items():  # each with its own plans
        calls[name] = functools.partial(call, form(weight), copy.copy(weight.quant_state), **how)
    medians(calls, 5, 1)
    return medians(calls, 100, 25)


def puzzle(contenders):
    """Return {name: seconds} of 100 rounds of the puzzle's test: three weights, each waited for."""

    def one_round(call, layers):
        for weight, state in layers:
            call(weight, state).t()
            torch.cuda.synchronize()

    seconds = collections.Counter()
    for dtype, hidden, inner in PUZZLE:
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        weights = [linear4bit(*shape, dtype).weight for shape in shapes]
        calls = {}
        for name, call in contenders.items():
            layers = [(weight, copy.copy(weight.quant_state)) for weight in weights]
            calls[name] = functools.partial(one_round, call, layers)
        medians(calls, 5, 1)
        seconds.update({name: 100e-6 * us for name, us in medians(calls, 100, 7).items()})
    return seconds


def main(kernels):
    import unsloth  # noqa: F401  it asks to come first
    from unsloth.kernels import nf4, triton_launch, utils

    today, patched = unpatched_function(kernels / "utils.py"), utils.fast_dequantize
    assert nf4._CONFIGS.pop((9, 0)) == nf4._CONFIGS[(10,)]  # below, (a) is an override of today's settings

    def with_settings(settings, function, *arguments, **how):
        nf4._CONFIG_OVERRIDE = settings
        return function(*arguments, **how)

    def check(weight, state, buffer):
        expected = today(weight, state)
        out = torch.full_like(expected.t() if weight.shape[0] == 1 else expected, torch.nan)
        ways = [{}, {}, {"dtype": torch.float32}, {"out": out}, {}]
        if buffer:
            ways[2:2] = [{"use_global_buffer": True}] * 2
        for settings in (B200, None):
            for how in ways:
                torch.full_like(expected, torch.nan)  # freed: a result is likely to get this memory
                found = with_settings(settings, patched, weight, state, **how)
                assert found.dtype == expected.dtype and found.stride() == expected.stride(), how
                bits = torch.int16 if expected.element_size() == 2 else torch.int32
                assert torch.equal(found.view(bits), expected.view(bits)), how

    with mock.patch.object(nf4, "relaunch", wraps=nf4.relaunch) as relaunch:
        compare(check, triton_launch)
    compare_graphs(today, patched)
    assert relaunch.called and utils._USE_NF4_KERNELS and triton_launch._ENABLED, "an error, or no relaunch"
    print(f"{torch.cuda.get_device_name()}: the same bits; {relaunch.call_count} launches repeated")

    contenders = {"today": (None, today), "(b)": (None, patched), "(a) and (b)": (B200, patched)}
    contenders = {name: functools.partial(with_settings, *one) for name, one in contenders.items()}
    rows = {
        "W": until_return(contenders, lambda weight: weight),
        "W.t()": until_return(contenders, torch.t),
        "into Unsloth's buffer": until_return(contenders, torch.t, use_global_buffer=True),
    }
    with mock.patch.object(triton_launch, "_ENABLED", False):
        rows["W, launcher off"] = until_return(contenders, lambda weight: weight)
    print(f"{'us until a call returns':32}", *(f"{name:>12}" for name in contenders))
    for title, row in rows.items():
        print(f"{title:32}", *(f"{row[name]:12.1f}" for name in contenders))
    seconds = puzzle(contenders)
    print(f"{'the puzzle, 100 rounds, s':32}", *(f"{seconds[name]:12.4f}" for name in contenders))
    for title, how in {"fresh": {}, "into Unsloth's buffer": {"use_global_buffer": True}}.items():
        kept = [kept_bytes(functools.partial(call, **how)) for call in contenders.values()]
        print(f"{'bytes kept, ' + title:32}", *(f"{count:12,}" for count in kept))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kernels = patched_copy(Path(folder))
        sys.path.insert(0, folder)
        main(kernels)
