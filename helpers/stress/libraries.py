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

import torch

from helpers import machine
from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import layers, reference
from helpers.results import names, store as results, tables
from helpers.stress.states import random_contents, state_of
from helpers.puzzle.protocol import DEVICE, baselines, name_of, synchronize

OURS = "kernel"
LIBRARIES = ("unsloth_today", "unsloth_classic", "bitsandbytes", "peft", OURS)
CRASHED = 3  # exit status of a worker whose GPU context is lost
HUGE = 2**31 + 8 * 2**14 + 24  # elements


@dataclass(frozen=True)
class Layout:
    """A quantized layer of `options`, changed by `before` the first call; `then` after one, and the second
    call is judged."""

    options: dict = field(default_factory=dict)  # of layers.quantized_layer
    before: Callable | None = None  # layer -> None
    then: Callable | None = None  # layer -> None
    broken: bool = False  # no right answer exists
    gpu: bool = False  # only on a GPU

    def make(self, device: str):
        """The layer, before any call."""
        options = dict(in_features=64, out_features=320, dtype=torch.bfloat16) | self.options
        layer = layers.quantized_layer(**options, device=device)
        if self.before:
            self.before(layer)
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
    """layer -> None: `change(packed bytes)` as its packed data, exactly as it comes."""

    def hold(layer):
        import bitsandbytes

        old = layer.weight
        layer.weight = bitsandbytes.nn.Params4bit(
            change(old.data),
            requires_grad=False,
            quant_state=old.quant_state,
            quant_type=old.quant_type,
            bnb_quantized=True,
        )

    return hold


def set_elements(n: int, dtype=torch.bfloat16, seed: int = 3407):
    """layer -> None: n random elements, nested, made without quantizing n floats first."""

    def change(layer):
        device = layer.weight.device
        packed, made = state_of((n, 1), *random_contents(seed, device, device), dtype)
        state = layer.weight.quant_state
        state.shape, state.dtype, state.absmax = made.shape, dtype, made.absmax
        state.state2.absmax = made.state2.absmax
        set_data(lambda old: packed)(layer)

    return change


def _half(tensor):
    return tensor[: len(tensor) // 2].clone()


def _second_level(blocksize2):
    return set_state(
        state2_blocksize=lambda s: blocksize2,
        state2_absmax=lambda s: torch.rand(320, device=s.absmax.device) + 0.1,
    )


def _as(dtype):
    return set_data(lambda packed: packed.view(-1).view(dtype).view(-1, 1))


def _scales(*first):
    return set_state(absmax=lambda s: torch.cat([s.absmax.new_tensor(first), s.absmax[len(first) :]]))


OPTIONS = {
    **{f"nf4, nested, {short}": dict(dtype=getattr(torch, name)) for name, short in names.DTYPES.items()},
    "nf4, nested, fp32": dict(dtype=torch.float32),
    "nf4, flat": dict(nested=False),
    "fp4, nested": dict(quant_type="fp4"),
    "fp4, flat": dict(quant_type="fp4", nested=False),
    **{f"blocksize {size}": dict(blocksize=size) for size in (32, 128, 256, 512, 1024, 2048, 4096)},
    "odd number of elements": dict(in_features=99, out_features=83),
    "one element": dict(in_features=1, out_features=1),
}
BEFORE = {
    **{f"state2.blocksize {size}": _second_level(size) for size in (64, 128, 512, 1)},
    **{f"quant_storage {name_of(dtype)}": _as(dtype) for dtype in reference.DTYPES},
    "weight from an odd address": set_data(lambda packed: torch.cat([packed[:1], packed])[1:]),
    "W.t()": set_data(lambda packed: packed.t()),
    "1-D weight": set_state(shape=lambda s: torch.Size([20480])),
    "3-D weight (fused experts)": set_state(shape=lambda s: torch.Size([5, 64, 64])),
    "weight not contiguous": set_data(lambda packed: torch.cat([packed, packed + 1], 1)[:, :1]),
    "absmax not contiguous": set_state(absmax=lambda s: torch.stack([s.absmax, 255 - s.absmax], 1)[:, 0]),
}
BEFORE_FLAT = {
    "infinite and NaN scales": _scales(math.inf, math.nan, -math.inf, 0.0),
    "subnormal scales": _scales(1e-38, 3e-39, 1e-40, 2e-38),
}
BETWEEN = {
    "codes edited in place": lambda layer: layer.weight.data.bitwise_xor_(255),
    "absmax edited in place": lambda layer: layer.weight.quant_state.absmax.bitwise_xor_(255),
    "absmax replaced": set_state(absmax=lambda s: 255 - s.absmax),
    "offset replaced": set_state(offset=lambda s: s.offset + 1),
    "state2 edited": set_state(state2_code=lambda s: -s.state2.code),
    "dtype changed": set_state(dtype=lambda s: torch.float16),
    "quant_type changed": set_state(quant_type=lambda s: "fp4"),
    "blocksize changed": set_state(blocksize=lambda s: 128),
}
BROKEN = {
    "absmax half as long": set_state(absmax=lambda s: _half(s.absmax)),
    "state2.absmax half as long": set_state(state2_absmax=lambda s: _half(s.state2.absmax)),
    "state2.code half as long": set_state(state2_code=lambda s: _half(s.state2.code)),
    "weight half as long": set_data(_half),
    "absmax of int32": set_state(absmax=lambda s: s.absmax.int()),
    "state2.absmax of fp16": set_state(state2_absmax=lambda s: s.state2.absmax.half()),
    "offset missing": set_state(offset=lambda s: None),
    "blocksize 96": set_state(blocksize=lambda s: 96),
    "repacked for the CPU": set_state(packing_format_for_cpu=lambda s: True),
}
ON_CPU = set_state(absmax=lambda s: s.absmax.cpu())
LAYOUTS = {
    **{name: Layout(options) for name, options in OPTIONS.items()},
    **{name: Layout(before=change) for name, change in BEFORE.items()},
    **{name: Layout(dict(nested=False), before=change) for name, change in BEFORE_FLAT.items()},
    "more than 2^31 elements": Layout(before=set_elements(HUGE), gpu=True),
    **{f"between two calls: {name}": Layout(then=change) for name, change in BETWEEN.items()},
    **{name: Layout(before=change, broken=True) for name, change in BROKEN.items()},
    "absmax on the CPU, weight on the GPU": Layout(before=ON_CPU, broken=True, gpu=True),
}


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
    block, part = start // state.blocksize, copy.copy(state)
    part.shape, part.state2 = torch.Size([size]), copy.copy(state.state2)
    part.absmax = state.absmax[block : block - (-size // state.blocksize)]
    part.state2.absmax = state.state2.absmax[block // state.state2.blocksize :]
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
        synchronize()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return {"outcome": "crash" if _context_lost() else "refused", "text": text[:200]}
    if layout.broken:
        return {"outcome": "accepted", "text": "gave a result of the shape asked for"}
    text = f"{wrong} of {result.numel()} elements" if wrong else ""
    return {"outcome": "wrong" if wrong else "exact", "text": text}


def _context_lost() -> bool:
    try:
        synchronize()
    except Exception:
        return True
    return False


def library_function(library: str) -> tuple[Callable | None, str]:
    """(layer -> weight of a library, or None; the reason why), for a process that runs no other library."""
    if library == OURS:
        return nf4_kernel.your_dequantize_nf4, ""
    if not library.startswith("unsloth"):
        sys.modules.update(unsloth=None, unsloth_zoo=None)  # importing them fails from here on
    baseline = baselines()[library]
    return baseline.fn, baseline.reason


def work(library: str, layouts: list[str]) -> int:
    """The child process: a JSON line on the library, then one after each layout."""
    function, reason = library_function(library)
    print(json.dumps({"absent": reason if function is None else ""}), flush=True)
    for name in layouts if function else ():
        row = {"name": name, **judge(function, LAYOUTS[name], DEVICE)}
        print(json.dumps(row), flush=True)
        if row["outcome"] == "crash":
            return CRASHED
    return 0


def examine(library: str, layouts) -> dict[str, dict] | str:
    """Every layout's {"outcome", "text"} for one library, by name; or the reason why it is absent."""
    outcomes, left = {}, list(layouts)
    while left:
        worker = ["-m", "helpers", "libraries", "--worker", library, *left]
        done = machine.python(worker, timeout=240, check=False)
        status = "a timeout" if done.status is None else done.status
        lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        if not lines:
            raise machine.ChildFailed(f"{library} ended with {status} before any layout:\n{done.err[-2000:]}")
        if lines[0]["absent"]:
            return lines[0]["absent"]
        outcomes |= {line.pop("name"): line for line in lines[1:]}
        left = [name for name in left if name not in outcomes]
        if left and status != CRASHED:  # it died in the next one
            outcomes[left.pop(0)] = {"outcome": "crash", "text": f"the process ended with {status}"}
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
    here = [name for name, layout in LAYOUTS.items() if DEVICE == "cuda" or not layout.gpu]
    layouts = arguments.layouts or here
    if arguments.worker:
        return work(arguments.worker, layouts)
    jobs = max(1, min(len(arguments.libraries), (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda library: examine(library, layouts), arguments.libraries))
    found = dict(zip(arguments.libraries, rows, strict=True))
    for library in [library for library, outcomes in found.items() if isinstance(outcomes, str)]:
        print(f"{names.label(library)}: absent, {found.pop(library)}")
    print(tables.markdown(table(found)))
    print(f"written: {results.write('libraries', found)}")
    right = {name: {"refused"} if layout.broken else {"refused", "exact"} for name, layout in LAYOUTS.items()}
    return int(any(row["outcome"] not in right[name] for name, row in found.get(OURS, {}).items()))
