"""Run PTX that was compiled for another card: the driver translates it for the GPU at hand.

A T4 executes sm_75 PTX, and every newer GPU accepts the same text. So what a T4 would compute can be
checked on any card, bit for bit: `python -m helpers foreign-ptx`, or from Python

    print(foreign_ptx.summary(foreign_ptx.prove(arch=75)))
"""

import argparse
import contextlib
import ctypes
import functools
import math
import re
from dataclasses import dataclass

import torch

from helpers.machine import environment
from helpers.nf4 import kernel as nf4_kernel
from helpers.submission import evidence, protocol
from helpers.t4 import compile_spec, cross_compile

EVERY = "every code with every scale"
SIZES = {
    "random layer": (4160, 1000),
    "odd tail": (4099, 1),
    "tail in the last block": (1365, 3),
}  # (in, out)
CASES = (EVERY, *SIZES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ON_HOPPER = (75, 80, 86, 89, 90)  # whose PTX a Hopper card runs
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
    kernels = {kernel: tuple(_PARAM.findall(parameters)) for kernel, parameters in _ENTRY.findall(ptx)}
    if name is None and len(kernels) == 1:
        (name,) = kernels
    if target is None or name not in kernels:
        raise ValueError(f"no kernel {name!r} in this PTX; it has {sorted(kernels)}")
    return Entry(name, target.group(1), kernels[name])


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
    kernel = entry(ptx, name)
    values = pack(kernel.parameters, args)
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type != "cuda":
        raise ValueError(f"the kernel's tensors must be on an NVIDIA GPU, got {device}")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        function = _function(ptx, kernel.name, device.index)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        grid = (*grid, 1, 1)[:3]
        code = _driver().cuLaunchKernel(
            function, *grid, 32 * num_warps, 1, 1, shared, stream, addresses, None
        )
        _check(code, f"launching {kernel.name}")
        torch.cuda.current_stream().synchronize()


def _layer(case: str, dtype, nested: bool, device):
    """A Linear4bit on `device`: every byte under 256 scales, or random of one of SIZES."""
    if case != EVERY:
        return evidence.quantized_layer(*SIZES[case], dtype, nested=nested, device=device)
    if nested:
        return evidence.every_code(dtype, device)
    layer = evidence.quantized_layer(64, 2048, dtype, nested=False, device=device)
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    absmax = layer.weight.quant_state.absmax
    absmax.copy_(absmax[:256].repeat_interleave(8))  # 8 blocks of 32 bytes hold all 256
    return layer


def _run(built, layer, grid, arguments, around) -> dict:
    """Differences between what the foreign kernel writes and bitsandbytes' own result."""
    state = layer.weight.quant_state
    run_ptx(built.ptx, built.name, grid, built.num_warps, arguments, built.shared)
    out = around[_GUARD:-_GUARD].view(state.shape)
    guards = torch.cat([around[:_GUARD], around[-_GUARD:]])
    return {
        "dtype": str(state.dtype).removeprefix("torch."),
        "nested": state.nested,
        "elements": out.numel(),
        "differing": protocol.different(out, protocol.expected(layer)),
        "written_outside": int((~guards.isnan()).sum()),
        "target": entry(built.ptx, built.name).target,
    }


def prove(device="cuda", arch: int = 75, dtypes=DTYPES, module=None) -> dict:
    """Run the kernel's sm_`arch` PTX on `device` and compare every bit with bitsandbytes.

    Every packed byte under every absmax code, a random layer, odd tails; nested and flat, in each of
    `dtypes`; outputs filled with NaN first and guarded on both sides. module: what holds the kernel (default:
    helpers.nf4.kernel). Returns "passed", "arch", "device", "capability", "triton", "bitsandbytes",
    "elements", "differing" and "cases"; "passed" is None where "needs" says what is missing.
    """
    needs = "an NVIDIA GPU"
    if environment.has_gpu():
        capability = environment.capability(device)
        needs = f"a card of sm_{arch} or newer" if capability < divmod(arch, 10) else ""
        needs = needs or ("" if environment.version_of("bitsandbytes") else "bitsandbytes")
    if needs:
        return {"passed": None, "arch": arch, "needs": needs, "cases": []}
    work = []
    for case, dtype, nested in ((c, d, n) for d in dtypes for n in (True, False) for c in CASES):
        layer = _layer(case, dtype, nested, device)
        shape = layer.weight.quant_state.shape
        around = torch.full((math.prod(shape) + 2 * _GUARD,), math.nan, dtype=dtype, device=device)
        out = around[_GUARD:-_GUARD].view(shape)
        state = layer.weight.quant_state
        launch = compile_spec.launch_arguments(layer.weight, state, out, arch, module or nf4_kernel)
        work.append((case, (dtype, nested, arch, {"numel": out.numel()}), layer, launch, around))
    kernels = cross_compile.compile_kernels([kind for _, kind, *_ in work], module)
    cases = [
        {"case": case} | _run(built, layer, *launch, around)
        for built, (case, _, layer, launch, around) in zip(kernels, work, strict=True)
    ]
    target = f"sm_{arch}"  # or sm_90a
    wrong = [c for c in cases if c["differing"] or c["written_outside"] or not c["target"].startswith(target)]
    return {
        "passed": not wrong,
        "arch": arch,
        "device": torch.cuda.get_device_name(device),
        "capability": list(capability),
        "triton": environment.version_of("triton"),
        "bitsandbytes": environment.version_of("bitsandbytes"),
        "elements": sum(case["elements"] for case in cases),
        "differing": sum(case["differing"] for case in cases),
        "cases": cases,
    }


def summary(proof: dict) -> str:
    """What `prove` returned, in a few lines."""
    arch = proof["arch"]
    if proof["passed"] is None:
        return f"PTX compiled for sm_{arch}: not run (needs {proof['needs']})"
    capability, verdict = "".join(map(str, proof["capability"])), "every bit equal"
    lines = [
        f"PTX compiled for sm_{arch} by Triton {proof['triton']}, run through the driver on "
        f"{proof['device']} (sm_{capability}):",
        f"{proof['differing']} of {proof['elements']} elements differ from bitsandbytes "
        f"{proof['bitsandbytes']} in {len(proof['cases'])} cases: "
        f"{verdict if proof['passed'] else 'NOT equal'}",
    ]
    for case in proof["cases"]:
        if case["differing"] or case["written_outside"] or not case["target"].startswith(f"sm_{arch}"):
            kind = f"{case['case']}, {case['dtype']}, {'nested' if case['nested'] else 'flat'}"
            wrong = f"{case['differing']} differ, {case['written_outside']} written outside the output"
            lines.append(f"  {kind}, {case['target']}: {wrong}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the proof for each card asked for. 1 when a bit differs, 2 where nothing could run."""
    parser = argparse.ArgumentParser(prog="python -m helpers foreign-ptx", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ON_HOPPER), help="75: a T4's sm_75")
    proofs = [prove(arch=arch) for arch in parser.parse_args(argv).arch]
    print("\n".join(map(summary, proofs)))
    verdicts = {proof["passed"] for proof in proofs}
    return 1 if False in verdicts else 0 if True in verdicts else 2
