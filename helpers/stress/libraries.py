"""What bitsandbytes, Unsloth, PEFT and this kernel each make of every layout: exact, wrong, refused or crash.

`python -m helpers libraries` runs each library in a process of its own, starts another after a crash (a
failed kernel poisons the process), prints the table and stores libraries.json. "exact" is bit equality to the
oracle. A broken state has no right answer: a library refuses it, crashes, or "accepts" it and reads whatever
lies behind the tensors. bitsandbytes and PEFT run where Unsloth, which would replace their functions, cannot
be imported.
"""

import argparse
import concurrent.futures
import copy
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from helpers.machine import child, environment
from helpers.nf4 import kernel as nf4_kernel
from helpers.oracle import layers, reference
from helpers.record import names, results, tables
from helpers.stress.states import random_contents, state_of
from helpers.submission.protocol import baselines

OURS = "kernel"
LIBRARIES = ("unsloth_today", "unsloth_classic", "bitsandbytes", "peft", OURS)
CRASHED = 3  # exit status of a worker whose GPU context is lost
HUGE = 2**31 + 8 * 2**14 + 24  # elements


@dataclass(frozen=True)
class Layout:
    """A quantized layer of `options`, changed by `before` the first call; `then` after one, and the second
    call is judged."""

    name: str
    options: dict = field(default_factory=dict)  # of layers.quantized_layer, and shape
    before: Callable | None = None  # layer -> None
    then: Callable | None = None  # layer -> None
    broken: bool = False  # no right answer exists
    gpu: bool = False  # only on a GPU

    def make(self, device: str):
        """The layer, before any call."""
        options = {"shape": (320, 64), "dtype": torch.bfloat16, **self.options}
        (rows, columns), dtype = options.pop("shape"), options.pop("dtype")
        layer = layers.quantized_layer(columns, rows, dtype, device=device, **options)
        if self.before:
            self.before(layer)
        return layer


def hold(layer, data=None, state=None):
    """Give the layer other packed data or another state, both exactly as they come."""
    import bitsandbytes

    old = layer.weight
    layer.weight = bitsandbytes.nn.Params4bit(
        old.data if data is None else data,
        requires_grad=False,
        quant_state=old.quant_state if state is None else state,
        quant_type=old.quant_type,
        bnb_quantized=True,
    )


def of_elements(device: str, n: int, dtype=torch.bfloat16):
    """A layer of n random elements, nested, made without quantizing n floats first."""
    layer = Layout("").make(device)
    packed, made = state_of((n, 1), *random_contents(3407, device, device), dtype)
    state = copy.copy(layer.weight.quant_state)
    state.state2 = copy.copy(state.state2)
    state.shape, state.dtype, state.absmax = made.shape, dtype, made.absmax
    state.state2.absmax = made.state2.absmax
    hold(layer, packed, state)
    return layer


def set_state(**fields):
    """layer -> None: new values for fields of its state, functions of the state; "state2_x" is state2.x."""

    def change(layer):
        state = layer.weight.quant_state
        for name, value in fields.items():
            owner = state.state2 if name.startswith("state2_") else state
            setattr(owner, name.removeprefix("state2_"), value(state))

    return change


def set_data(change):
    """layer -> None: `change(packed bytes)` as its packed data."""
    return lambda layer: hold(layer, change(layer.weight.data))


def set_scales(values):
    """layer -> None: some of its flat scales."""

    def change(layer):
        absmax = layer.weight.quant_state.absmax
        absmax[: len(values)] = torch.tensor(values, device=absmax.device)

    return change


def _half(tensor):
    return tensor[: len(tensor) // 2].clone()


def _second_level(blocksize2):
    return set_state(
        state2_blocksize=lambda s: blocksize2,
        state2_absmax=lambda s: torch.rand(320, device=s.absmax.device) + 0.1,
    )


def _of_shape(*shape):
    return set_state(shape=lambda s: torch.Size(shape))


def _as(dtype):
    return set_data(lambda packed: packed.view(-1).view(dtype).view(-1, 1))


def _layouts():
    for dtype, name in zip(reference.DTYPES, ("fp16", "bf16", "fp32"), strict=True):
        yield Layout(f"nf4, nested, {name}", dict(dtype=dtype))
    yield Layout("nf4, flat", dict(nested=False))
    yield Layout("fp4, nested", dict(quant_type="fp4"))
    yield Layout("fp4, flat", dict(quant_type="fp4", nested=False))
    for size in (32, 128, 256, 512, 1024, 2048, 4096):
        yield Layout(f"blocksize {size}", dict(blocksize=size))
    for size in (64, 128, 512, 1):
        yield Layout(f"state2.blocksize {size}", before=_second_level(size))
    yield Layout("odd number of elements", dict(shape=(83, 99)))
    yield Layout("one element", dict(shape=(1, 1)))
    for dtype in reference.DTYPES:
        yield Layout(f"quant_storage {str(dtype).removeprefix('torch.')}", before=_as(dtype))
    yield Layout(
        "weight from an odd address", before=set_data(lambda packed: torch.cat([packed[:1], packed])[1:])
    )
    yield Layout("W.t()", before=set_data(lambda packed: packed.t()))
    yield Layout("1-D weight", before=_of_shape(20480))
    yield Layout("3-D weight (fused experts)", before=_of_shape(5, 64, 64))
    yield Layout(
        "weight not contiguous", before=set_data(lambda packed: torch.cat([packed, packed + 1], 1)[:, :1])
    )
    yield Layout(
        "absmax not contiguous",
        before=set_state(absmax=lambda s: torch.stack([s.absmax, 255 - s.absmax], 1)[:, 0]),
    )
    for name, values in {
        "infinite and NaN scales": [math.inf, math.nan, -math.inf, 0.0],
        "subnormal scales": [1e-38, 3e-39, 1e-40, 2e-38],
    }.items():
        yield Layout(name, dict(nested=False), before=set_scales(values))
    yield Layout("more than 2^31 elements", before=_huge, gpu=True)
    for name, change in {
        "codes edited in place": lambda layer: layer.weight.data.bitwise_xor_(255),
        "absmax edited in place": lambda layer: layer.weight.quant_state.absmax.bitwise_xor_(255),
        "absmax replaced": set_state(absmax=lambda s: 255 - s.absmax),
        "offset replaced": set_state(offset=lambda s: s.offset + 1),
        "state2 edited": set_state(state2_code=lambda s: -s.state2.code),
        "dtype changed": set_state(dtype=lambda s: torch.float16),
        "quant_type changed": set_state(quant_type=lambda s: "fp4"),
        "blocksize changed": set_state(blocksize=lambda s: 128),
    }.items():
        yield Layout(f"between two calls: {name}", then=change)
    for name, change in {
        "absmax half as long": set_state(absmax=lambda s: _half(s.absmax)),
        "state2.absmax half as long": set_state(state2_absmax=lambda s: _half(s.state2.absmax)),
        "state2.code half as long": set_state(state2_code=lambda s: _half(s.state2.code)),
        "weight half as long": set_data(_half),
        "absmax of int32": set_state(absmax=lambda s: s.absmax.int()),
        "state2.absmax of fp16": set_state(state2_absmax=lambda s: s.state2.absmax.half()),
        "offset missing": set_state(offset=lambda s: None),
        "blocksize 96": set_state(blocksize=lambda s: 96),
        "repacked for the CPU": set_state(packing_format_for_cpu=lambda s: True),
    }.items():
        yield Layout(name, before=change, broken=True)
    to_cpu = set_state(absmax=lambda s: s.absmax.cpu())
    yield Layout("absmax on the CPU, weight on the GPU", before=to_cpu, broken=True, gpu=True)


def _huge(layer):
    other = of_elements("cuda", HUGE).weight
    hold(layer, other.data, other.quant_state)


LAYOUTS = {layout.name: layout for layout in _layouts()}


def wrong_elements(result, layer, most=2**22) -> int:
    """How many elements differ from the oracle; of very many, windows at the start, middle and end."""
    weight, state = layer.weight, layer.weight.quant_state
    n = math.prod(state.shape)
    if n <= most:
        expected = reference.dequantize(weight, state)
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return expected.numel()
        return reference.different(result, expected)
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
    part = SimpleNamespace(
        **{name: getattr(state, name) for name in ("offset", "dtype", "quant_type", "blocksize")}
    )
    part.shape = torch.Size([size])
    part.absmax = state.absmax[block : block - (-size // state.blocksize)]
    part.state2 = copy.copy(state.state2)
    part.state2.absmax = state.state2.absmax[group:]
    return reference.dequantize(weight.data.view(-1)[start // 2 : start // 2 + size // 2 + 1], part)


def judge(function, layout: Layout, device: str) -> dict:
    """The "outcome" of a layout (exact, wrong, refused, crash or accepted) and a "text" on it.

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


def library_function(library: str) -> tuple[Callable | None, str]:
    """(layer -> weight of a library, or None; the reason why), for a process that runs no other library."""
    if library == OURS:
        return nf4_kernel.your_dequantize_nf4, ""
    if not library.startswith("unsloth"):
        sys.modules.update(unsloth=None, unsloth_zoo=None)  # importing them fails from here on
    baseline = baselines()[library]
    return baseline.fn, baseline.reason


def work(library: str, layouts: list[str]) -> int:
    """The child process: one JSON line before and one after each layout."""
    device = "cuda" if environment.has_gpu() else "cpu"
    function, reason = library_function(library)
    if function is None:
        print(json.dumps({"absent": reason}), flush=True)
        return 0
    for name in layouts:
        print(json.dumps({"begins": name}), flush=True)
        outcome = judge(function, LAYOUTS[name], device)
        print(json.dumps({"name": name, **outcome}), flush=True)
        if outcome["outcome"] == "crash":
            return CRASHED
    return 0


def examine(library: str, layouts, timeout: float = 240) -> dict[str, dict] | str:
    """Every layout's {"outcome", "text"} for one library, by name; or the reason why it is absent."""
    outcomes, left = {}, list(layouts)
    while left:
        worker = ["-m", "helpers", "libraries", "--worker", library, *left]
        done = child.python(worker, timeout=timeout, check=False)
        lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        status = "a timeout" if done.status is None else done.status
        if not lines:
            raise child.ChildFailed(f"{library} ended with {status} before any layout:\n{done.err[-2000:]}")
        if "absent" in lines[0]:
            return lines[0]["absent"]
        outcomes |= {line.pop("name"): line for line in lines if "name" in line}
        begun = [line["begins"] for line in lines if "begins" in line][-1]
        outcomes.setdefault(begun, {"outcome": "crash", "text": f"the process ended with {status}"})
        left = [name for name in left if name not in outcomes]
    return outcomes


def table(outcomes: dict[str, dict]) -> tables.Table:
    """A row a layout, a column a library. outcomes: layout -> {"outcome", "text"}, by library."""
    rows = [["layout", *map(names.label, outcomes)]]
    for layout in LAYOUTS:
        row = [found[layout]["outcome"] if layout in found else "-" for found in outcomes.values()]
        rows += [[layout, *row]] if set(row) - {"-"} else []
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("layouts", nargs="*", help="(default: all that run here)")
    arguments = parser.parse_args(argv)
    gpu = environment.has_gpu()
    layouts = arguments.layouts or [name for name, layout in LAYOUTS.items() if gpu or not layout.gpu]
    if arguments.worker:
        return work(arguments.worker, layouts)
    jobs = max(1, min(len(arguments.libraries), (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda library: examine(library, layouts), arguments.libraries))
    data = {}
    for library, outcomes in zip(arguments.libraries, rows, strict=True):
        if isinstance(outcomes, str):
            print(f"{names.label(library)}: absent, {outcomes}")
        else:
            data[library] = outcomes
    print(tables.markdown(table(data)))
    print(f"written: {results.write('libraries', data)}")
    wanted = {name: "refused" if layout.broken else "exact" for name, layout in LAYOUTS.items()}
    return int(any(row["outcome"] != wanted[name] for name, row in data.get(OURS, {}).items()))
