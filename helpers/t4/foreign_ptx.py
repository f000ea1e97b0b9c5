"""Run PTX that was compiled for another card: the driver translates it for the GPU at hand.

A T4 executes sm_75 PTX; every newer GPU accepts the same text. So what a T4 would compute can be checked on
any card, bit for bit:

    from helpers.t4 import foreign_ptx
    evidence = foreign_ptx.prove("cuda")
    print(foreign_ptx.summary(evidence))
"""

import contextlib
import ctypes
import functools
import re
from dataclasses import dataclass

CASES = ("all codes and scales", "random layer", "odd tail", "tail in the last block")
_SIZES = {"random layer": (1000, 4160), "odd tail": (1, 4099), "tail in the last block": (3, 1365)}
# What those need of the kernel, compiled together: one child process instead of many.
_VARIANTS = ({"tail": False, "small": True}, {"tail": False, "small": False}, {"tail": True, "small": True})
_GUARD = 256  # elements on either side of the output that must stay untouched
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.S)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)")
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6  # CUjit_option


class DriverError(RuntimeError):
    """libcuda is missing or refused a call; the text has its words."""


@dataclass(frozen=True)
class Entry:
    """What the text of a PTX module says about its kernel."""

    name: str
    target: str  # "sm_75"
    parameters: tuple[str, ...]  # "u64" or "u32", in order


def entry(ptx: str, name: str | None = None) -> Entry:
    """The kernel `name` of a PTX text (None: its only one). ValueError when there is no such kernel."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    found = {kernel: tuple(_PARAM.findall(parameters)) for kernel, parameters in _ENTRY.findall(ptx)}
    if name is None and len(found) == 1:
        (name,) = found
    if target is None or name not in found:
        raise ValueError(f"no kernel {name!r} in this PTX; it has {sorted(found)}")
    return Entry(name, target.group(1), found[name])


@functools.cache
def _driver():
    """libcuda with the argument types of the calls used here."""
    for library in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with contextlib.suppress(OSError):
            cuda = ctypes.CDLL(library)
            break
    else:
        raise DriverError("the CUDA driver (libcuda.so.1) is not on this machine: needs an NVIDIA GPU")
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    array = ctypes.POINTER(pointer)
    cuda.cuModuleLoadDataEx.argtypes = [array, ctypes.c_char_p, unsigned, ctypes.POINTER(ctypes.c_int), array]
    cuda.cuModuleGetFunction.argtypes = [array, pointer, ctypes.c_char_p]
    cuda.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, array, array]
    cuda.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return cuda


def _check(code: int, what: str, log: str = "") -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {code}"
        raise DriverError(f"{what}: {reason}{log and f': {log}'}")


@functools.lru_cache(maxsize=64)
def _function(ptx: str, name: str, device: int):
    """The loaded kernel's handle; modules belong to a device's context and stay loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(16384)
    options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    code = _driver().cuModuleLoadDataEx(ctypes.byref(module), ptx.encode(), 2, options, values)
    _check(code, "loading the PTX", log.value.decode(errors="replace").strip())
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
    return function


def pack(parameters: tuple[str, ...], args) -> list:
    """The arguments as ctypes values, one a parameter: tensors as addresses, ints in their width.

    Triton appends pointers to scratch memory that this kernel does not use: they get nulls. ValueError when
    there are too many arguments, or when one that is missing is no pointer.
    """
    kinds = {"u64": ctypes.c_uint64, "b64": ctypes.c_uint64, "s64": ctypes.c_int64}
    kinds |= {"u32": ctypes.c_uint32, "b32": ctypes.c_uint32, "s32": ctypes.c_int32}
    if len(args) > len(parameters) or not all(p.endswith("64") for p in parameters[len(args) :]):
        raise ValueError(f"{len(args)} arguments do not fit the kernel's parameters {', '.join(parameters)}")
    values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
    values += [0] * (len(parameters) - len(args))
    return [kinds[kind](value) for kind, value in zip(parameters, values, strict=True)]


def run_ptx(ptx: str, name: str | None, grid, num_warps: int, args, shared: int = 0) -> None:
    """Launch a kernel of a PTX text on the device of its first tensor argument, on torch's current stream.

    grid: (x, y, z) blocks of 32 * num_warps threads; args: CUDA tensors and ints in the kernel's order;
    shared: dynamic shared memory in bytes; name: None for a text with one kernel. Returns when it is done.
    Raises DriverError, or ValueError for arguments that do not fit.
    """
    import torch

    found = entry(ptx, name)
    values = pack(found.parameters, args)
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type != "cuda":
        raise ValueError(f"the kernel's tensors must be on an NVIDIA GPU, got {device}")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        function = _function(ptx, found.name, device.index)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        grid = (*grid, 1, 1)[:3]
        code = _driver().cuLaunchKernel(
            function, *grid, 32 * num_warps, 1, 1, shared, stream, addresses, None
        )
        _check(code, f"launching {found.name}")
        torch.cuda.current_stream().synchronize()


def _all_codes(nested: bool, dtype, device):
    """(packed weight, quant state): every packed byte under every absmax code (flat: under 256 scales)."""
    import torch
    from bitsandbytes.functional import QuantState, quantize_4bit

    source = torch.randn(256 * 256, 64, generator=torch.Generator().manual_seed(1)).to(device)
    _, state = quantize_4bit(source, blocksize=64, compress_statistics=nested, quant_type="nf4")
    # A block holds 32 bytes, so a scale needs 8 blocks to meet all 256 byte values.
    weight = torch.arange(256, dtype=torch.uint8, device=device).repeat(256).view(-1, 1)
    codes = torch.arange(256, device=device).repeat_interleave(8)
    common = dict(shape=torch.Size((2048, 64)), code=state.code, blocksize=64, quant_type="nf4", dtype=dtype)
    if not nested:
        return weight, QuantState(absmax=state.absmax[codes].contiguous(), **common)
    second = QuantState(
        absmax=state.state2.absmax[:8].contiguous(),
        code=state.state2.code,
        blocksize=256,
        dtype=torch.float32,
    )
    absmax = codes.to(torch.uint8)
    return weight, QuantState(absmax=absmax, offset=state.offset, state2=second, **common)


def _layer(shape, nested: bool, dtype, device):
    import torch
    from bitsandbytes.functional import quantize_4bit

    source = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, dtype) * 0.02
    return quantize_4bit(source, blocksize=64, compress_statistics=nested, quant_type="nf4")


def _case(module, what: str, dtype, nested: bool, device, arch: int) -> dict:
    """One comparison: the foreign kernel's output, poisoned before, against bitsandbytes' own."""
    import math

    import torch
    from bitsandbytes.functional import dequantize_4bit

    from helpers.t4 import compile_spec, cross_compile, sass

    if what == CASES[0]:
        weight, state = _all_codes(nested, dtype, device)
    else:
        weight, state = _layer(_SIZES[what], nested, dtype, device)
    numel = math.prod(state.shape)
    expected = dequantize_4bit(weight, state)
    around = torch.full((numel + 2 * _GUARD,), math.nan, dtype=dtype, device=device)
    out = around[_GUARD : _GUARD + numel].view(state.shape)
    with module.force(**cross_compile.decisions(module, arch)):
        grid, args = compile_spec.launch_arguments(weight, state, out)
        small = numel <= module.settings().small
    compiled = sass.compile_kernel(dtype, nested, arch, tail=numel % 8 != 0, small=small)
    run_ptx(compiled.ptx, compiled.name, grid, compiled.num_warps, args, compiled.shared)
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    differing = int((out.view(integer) != expected.view(integer)).sum())
    guards = torch.cat([around[:_GUARD], around[_GUARD + numel :]])
    return {
        "case": what,
        "dtype": str(dtype).removeprefix("torch."),
        "nested": nested,
        "elements": numel,
        "differing": differing,
        "written_outside": int((~guards.isnan()).sum()),
        "target": entry(compiled.ptx, compiled.name).target,
    }


def prove(device="cuda", arch: int = 75, dtypes=None) -> dict:
    """Run the kernel's sm_`arch` PTX on `device` and compare every bit with bitsandbytes.

    All packed bytes under all absmax codes, a random layer, odd tails; `dtypes` (fp16, bf16 and fp32 unless
    named); nested and flat; outputs filled with NaN first and guarded on both sides. Returns "passed",
    "arch", "device", "capability", "triton", "bitsandbytes", "elements", "differing", "cases"; without a
    GPU or bitsandbytes, or on an sm_`arch` itself, "passed" is None and "needs" says what is missing.
    """
    import torch

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.machine import environment
    from helpers.t4 import sass

    if not environment.has_gpu():
        return {"passed": None, "arch": arch, "needs": "an NVIDIA GPU", "cases": []}
    if environment.version_of("bitsandbytes") is None:
        return {"passed": None, "arch": arch, "needs": "bitsandbytes", "cases": []}
    if environment.capability(device) == divmod(arch, 10):
        needs = f"a card of another kind: this one is an sm_{arch}, and runs that very code anyway"
        return {"passed": None, "arch": arch, "needs": needs, "cases": []}
    module, device = nf4_kernel, torch.device(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    kinds = [
        (dtype, nested)
        for dtype in dtypes or (torch.float16, torch.bfloat16, torch.float32)
        for nested in (True, False)
    ]
    sass.compile_kernels([(*kind, arch, variant) for kind in kinds for variant in _VARIANTS])
    cases = [_case(module, what, *kind, device, arch) for kind in kinds for what in CASES]
    wrong = [c for c in cases if c["differing"] or c["written_outside"] or c["target"] != f"sm_{arch}"]
    return {
        "passed": not wrong,
        "arch": arch,
        "device": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "triton": environment.version_of("triton"),
        "bitsandbytes": environment.version_of("bitsandbytes"),
        "elements": sum(case["elements"] for case in cases),
        "differing": sum(case["differing"] for case in cases),
        "cases": cases,
    }


def summary(evidence: dict) -> str:
    """The evidence of `prove` in a few lines."""
    arch = evidence["arch"]
    if evidence["passed"] is None:
        return f"PTX compiled for sm_{arch}: not run (needs {evidence['needs']})"
    capability, verdict = "".join(map(str, evidence["capability"])), "every bit equal"
    lines = [
        f"PTX compiled for sm_{arch} by Triton {evidence['triton']}, run through the driver on "
        f"{evidence['device']} (sm_{capability}):",
        f"{evidence['differing']} of {evidence['elements']} elements differ from bitsandbytes "
        f"{evidence['bitsandbytes']} in {len(evidence['cases'])} cases: "
        f"{verdict if evidence['passed'] else 'NOT equal'}",
    ]
    for case in evidence["cases"]:
        if case["differing"] or case["written_outside"]:
            kind = f"{case['case']}, {case['dtype']}, {'nested' if case['nested'] else 'flat'}"
            wrong = f"{case['differing']} differ, {case['written_outside']} written outside the output"
            lines.append(f"  {kind}: {wrong}")
    return "\n".join(lines)
