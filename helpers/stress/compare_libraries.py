"""What bitsandbytes, Unsloth, PEFT and this kernel each make of every layout: exact, wrong, refused or crash.

`python -m helpers.stress.compare_libraries` runs each library in a process of its own, starts another after a crash
(a failed kernel poisons the process), prints the table and stores libraries.json. "exact" is bit equality to
the oracle. A broken state has no right answer: a library refuses it, crashes, or "accepts" it and reads
whatever lies behind the tensors.
"""

import argparse
import concurrent.futures
import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from helpers.nf4 import kernel as nf4_kernel
from helpers.machine import environment
from helpers.oracle import layers, reference
from helpers.record import results

OURS = "ours"
LIBRARIES = {
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
    OURS: "this kernel",
}
CRASHED = 3  # exit status of a worker whose GPU context is lost
HUGE = 2**31 + 8 * 2**14 + 24  # elements


@dataclass(frozen=True)
class Layout:
    name: str
    make: Callable  # device -> layer
    then: Callable | None = None  # change the layer after a first call; the second call is judged
    broken: bool = False  # no right answer exists
    gpu: bool = False  # only on a GPU


def _with(layer, data=None, state=None):
    """The layer with other packed data or another state, both exactly as given."""
    import bitsandbytes

    old = layer.weight
    state = old.quant_state if state is None else state
    data = old.data if data is None else data
    weight = bitsandbytes.nn.Params4bit(
        data, requires_grad=False, quant_state=state, quant_type=old.quant_type, bnb_quantized=True
    )
    layer.weight = weight
    return layer


def plain(device, shape=(320, 64), dtype=torch.bfloat16, **options):
    return layers.quantized_layer(shape[1], shape[0], dtype, device=device, **options)


def second_level(device, blocksize2):
    layer = plain(device)
    state2 = layer.weight.quant_state.state2
    state2.blocksize = blocksize2
    state2.absmax = torch.rand(320, device=device) + 0.1
    return layer


def stored_as(device, dtype):
    layer = plain(device)
    return _with(layer, layer.weight.data.view(-1).view(dtype).view(-1, 1))


def unaligned(device, skip=1):
    """The packed bytes begin `skip` bytes into larger memory, as after slicing a stack of weights."""
    layer = plain(device)
    packed = layer.weight.data
    return _with(layer, torch.cat([packed[:skip], packed])[skip:])


def transposed(device):
    layer = plain(device)
    return _with(layer, layer.weight.data.t())


def of_shape(device, *shape):
    layer = plain(device)
    state = copy.copy(layer.weight.quant_state)
    state.shape = torch.Size(shape)
    return _with(layer, state=state)


def not_contiguous(device):
    layer = plain(device)
    packed = layer.weight.data
    return _with(layer, torch.cat([packed, packed + 1], dim=1)[:, :1])


def of_scales(device, values):
    """Flat scales, among them these."""
    layer = plain(device, nested=False)
    absmax = layer.weight.quant_state.absmax
    absmax[: len(values)] = torch.tensor(values, device=device)
    return layer


def of_elements(device, n, dtype=torch.bfloat16):
    """n random elements without quantizing n floats first: random codes and scales."""
    layer = plain(device)
    state, blocks = copy.copy(layer.weight.quant_state), -(-n // 64)
    generator = torch.Generator(device).manual_seed(3407)
    options = dict(dtype=torch.uint8, device=device, generator=generator)
    state.shape, state.dtype, state.state2 = torch.Size([n, 1]), dtype, copy.copy(state.state2)
    state.absmax = torch.randint(256, (blocks,), **options)
    state.state2.absmax = torch.rand(-(-blocks // 256), device=device, generator=generator) + 0.1
    return _with(layer, torch.randint(256, (-(-n // 2), 1), **options), state)


def wrong_elements(result, layer, most=2**22, signless=False):
    """How many elements differ from the oracle; of very many, windows at the start, middle and end."""
    weight, state = layer.weight, layer.weight.quant_state
    n = math.prod(state.shape)
    if n <= most:
        expected = reference.dequantize(weight, state)
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return expected.numel()
        return reference.different(result, expected + 0.0 if signless else expected)
    group = state.blocksize * state.state2.blocksize
    last = n // group * group
    return sum(
        reference.different(result.view(-1)[start : start + size], _window(weight, state, start, size))
        for start in (0, 2**30, 2**31 - group, 2**31, last - group, last)
        if (size := min(group, n - start)) > 0
    )


def _window(weight, state, start, size):
    """The oracle for `size` elements from `start`, a multiple of blocksize * state2.blocksize."""
    block, group = start // state.blocksize, start // (state.blocksize * state.state2.blocksize)
    state2 = SimpleNamespace(
        absmax=state.state2.absmax[group:],
        code=state.state2.code,
        blocksize=state.state2.blocksize,
        dtype=torch.float32,
    )
    blocks = -(-size // state.blocksize)
    part = SimpleNamespace(
        absmax=state.absmax[block : block + blocks],
        state2=state2,
        offset=state.offset,
        shape=torch.Size([size]),
        dtype=state.dtype,
        quant_type=state.quant_type,
        blocksize=state.blocksize,
    )
    return reference.dequantize(weight.data.view(-1)[start // 2 : start // 2 + size // 2 + 1], part)


def edit(layer, change):
    change(layer.weight.quant_state)
    return layer


def cut(state, name):
    owner = state.state2 if name.startswith("state2") else state
    attribute = name.removeprefix("state2.")
    old = getattr(owner, attribute)
    setattr(owner, attribute, old[: len(old) // 2].clone())


def _layouts():
    yield Layout("nf4, nested, fp16", lambda d: plain(d, dtype=torch.float16))
    yield Layout("nf4, nested, bf16", plain)
    yield Layout("nf4, nested, fp32", lambda d: plain(d, dtype=torch.float32))
    yield Layout("nf4, flat", lambda d: plain(d, nested=False))
    yield Layout("fp4, nested", lambda d: plain(d, quant_type="fp4"))
    yield Layout("fp4, flat", lambda d: plain(d, quant_type="fp4", nested=False))
    for size in (32, 128, 256, 512, 1024, 2048, 4096):
        yield Layout(f"blocksize {size}", lambda d, size=size: plain(d, blocksize=size))
    for size in (64, 128, 512, 1):
        yield Layout(f"state2.blocksize {size}", lambda d, size=size: second_level(d, size))
    yield Layout("odd number of elements", lambda d: plain(d, (83, 99)))
    yield Layout("one element", lambda d: plain(d, (1, 1)))
    for dtype in reference.DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield Layout(f"quant_storage {name}", lambda d, dtype=dtype: stored_as(d, dtype))
    yield Layout("weight from an odd address", unaligned)
    yield Layout("W.t()", transposed)
    yield Layout("1-D weight", lambda d: of_shape(d, 20480))
    yield Layout("3-D weight (fused experts)", lambda d: of_shape(d, 5, 64, 64))
    yield Layout("weight not contiguous", not_contiguous)
    yield Layout("infinite and NaN scales", lambda d: of_scales(d, [math.inf, math.nan, -math.inf, 0.0]))
    yield Layout("subnormal scales", lambda d: of_scales(d, [1e-38, 3e-39, 1e-40, 2e-38]))
    yield Layout("more than 2^31 elements", lambda d: of_elements(d, HUGE), gpu=True)
    changes = {
        "codes edited in place": lambda layer: layer.weight.data.bitwise_xor_(255),
        "absmax edited in place": lambda layer: layer.weight.quant_state.absmax.bitwise_xor_(255),
        "absmax replaced": lambda layer: edit(layer, lambda s: setattr(s, "absmax", 255 - s.absmax)),
        "offset replaced": lambda layer: edit(layer, lambda s: setattr(s, "offset", s.offset + 1)),
        "state2 edited": lambda layer: edit(layer, lambda s: setattr(s.state2, "code", -s.state2.code)),
        "dtype changed": lambda layer: edit(layer, lambda s: setattr(s, "dtype", torch.float16)),
        "quant_type changed": lambda layer: edit(layer, lambda s: setattr(s, "quant_type", "fp4")),
        "blocksize changed": lambda layer: edit(layer, lambda s: setattr(s, "blocksize", 128)),
    }
    for name, change in changes.items():
        yield Layout(f"between two calls: {name}", plain, then=change)
    for name in ("absmax", "state2.absmax", "state2.code"):
        yield Layout(
            f"{name} half as long", lambda d, name=name: edit(plain(d), lambda s: cut(s, name)), broken=True
        )
    yield Layout(
        "weight half as long", lambda d: _with(plain(d), plain(d).weight.data[:5120].clone()), broken=True
    )
    spoiled = {
        "absmax of int32": lambda s: setattr(s, "absmax", s.absmax.int()),
        "state2.absmax of fp16": lambda s: setattr(s.state2, "absmax", s.state2.absmax.half()),
        "absmax not contiguous": lambda s: setattr(s, "absmax", torch.stack([s.absmax] * 2, 1)[:, 0]),
        "offset missing": lambda s: setattr(s, "offset", None),
        "blocksize 96": lambda s: setattr(s, "blocksize", 96),
        "repacked for the CPU": lambda s: setattr(s, "packing_format_for_cpu", True),
    }
    for name, change in spoiled.items():
        yield Layout(name, lambda d, change=change: edit(plain(d), change), broken=True)
    yield Layout(
        "absmax on the CPU, weight on the GPU",
        lambda d: edit(plain(d), lambda s: setattr(s, "absmax", s.absmax.cpu())),
        broken=True,
        gpu=True,
    )


LAYOUTS = {layout.name: layout for layout in _layouts()}


def judge(function, layout, device) -> dict:
    """{"outcome": "exact" | "wrong" | "refused" | "crash" | "accepted", "text": ...} of one layout.

    "crash" here is an error that the GPU reports; the process is of no use afterwards.
    """
    layer = layout.make(device)
    try:
        result = function(layer).detach()
        if layout.then:
            layout.then(layer)
            result = function(layer).detach()
        wrong = 0 if layout.broken else wrong_elements(result, layer)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return {"outcome": "crash" if _context_lost(device) else "refused", "text": text[:200]}
    if layout.broken:
        return {"outcome": "accepted", "text": "gave a result of the shape asked for"}
    if wrong and not wrong_elements(result + 0.0, layer, signless=True):
        return {"outcome": "exact but -0", "text": f"the sign of zero differs in {wrong} elements"}
    text = f"{wrong} of {result.numel()} elements" if wrong else ""
    return {"outcome": "wrong" if wrong else "exact", "text": text}


def _context_lost(device):
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        return False
    except Exception:
        return True


def _function(library):
    """layer -> weight of a library, or the reason why there is none."""
    if library == OURS:
        return nf4_kernel.your_dequantize_nf4, ""
    from helpers.oracle import baselines

    found = baselines.available()[library]
    return found.fn, found.reason


def work(library, names) -> int:
    """The child process: one JSON line before and one after each layout."""
    environment.prepare()
    device = "cuda" if environment.has_gpu() else "cpu"
    function, reason = _function(library)
    if function is None:
        print(json.dumps({"absent": reason}), flush=True)
        return 0
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        found = judge(function, LAYOUTS[name], device)
        print(json.dumps({"name": name, **found}), flush=True)
        if found["outcome"] == "crash":
            return CRASHED
    return 0


def examine(library, names, timeout=240) -> dict:
    """Every layout's outcome for one library: {name: {"outcome", "text"}}, or {"absent": reason}."""
    found, left = {}, list(names)
    while left:
        command = [sys.executable, "-m", "helpers.stress.compare_libraries", "--worker", library, *left]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=environment.ROOT, timeout=timeout
            )
            printed, status, why = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            printed, status, why = (error.stdout or b"").decode(), "timeout", ""
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if lines and "absent" in lines[0]:
            return lines[0]
        found |= {
            line["name"]: {"outcome": line["outcome"], "text": line["text"]}
            for line in lines
            if "name" in line
        }
        begun = [line["begins"] for line in lines if "begins" in line]
        if not begun:
            raise RuntimeError(
                f"the process for {library} ended with {status} before any layout:\n{why[-2000:]}"
            )
        if begun[-1] not in found:
            found[begun[-1]] = {"outcome": "crash", "text": f"the process ended with {status}"}
        left = [name for name in left if name not in found]
    return found


def table(found: dict) -> str:
    """Markdown: a row a layout, a column a library."""
    present = [name for name in LIBRARIES if name in found and "absent" not in found[name]]
    lines = ["| layout | " + " | ".join(LIBRARIES[name] for name in present) + " |"]
    lines.append("|---|" + "---|" * len(present))
    for layout in LAYOUTS:
        if any(layout in found[name] for name in present):
            row = [found[name].get(layout, {}).get("outcome", "-") for name in present]
            lines.append(f"| {layout} | " + " | ".join(row) + " |")
    absent = [f"{LIBRARIES[name]}: {found[name]['absent']}" for name in found if "absent" in found[name]]
    return "\n".join(lines + [""] * bool(absent) + absent)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers.stress.compare_libraries", description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("names", nargs="*", help="layouts (default: all that run here)")
    arguments = parser.parse_args(argv)
    names = arguments.names or [
        name for name, layout in LAYOUTS.items() if environment.has_gpu() or not layout.gpu
    ]
    if arguments.worker:
        return work(arguments.worker, names)
    jobs = max(1, min(len(arguments.libraries), (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda library: examine(library, names), arguments.libraries))
    found = dict(zip(arguments.libraries, rows, strict=True))
    print(table(found))
    path = results.write("libraries", found)
    print(f"written: {path}")
    ours = found.get(OURS, {})
    wanted = {name: ("refused",) if LAYOUTS[name].broken else ("exact", "refused") for name in ours}
    return int(any(found["outcome"] not in wanted[name] for name, found in ours.items()))


if __name__ == "__main__":
    sys.exit(main())
