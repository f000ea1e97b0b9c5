"""Run PTX that was compiled for another card: the driver translates it for the GPU at hand.

A T4 executes sm_75 PTX, and every newer GPU accepts the same text. So what a T4 would compute can be
checked on any card, bit for bit: `python -m helpers foreign-ptx`, or from Python

    print(foreign_ptx.summary(foreign_ptx.prove(arch=75)))
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import math
import re

import torch

from helpers.machine import environment
from helpers.nf4 import kernel as nf4_kernel
from helpers.record.names import dtype_name
from helpers.submission import evidence, protocol
from helpers.t4 import compile_spec, cross_compile

EVERY = "every code with every scale"
# (in, out)
SIZES = {"random layer": (4160, 1000), "odd tail": (4099, 1), "tail in the last block": (1365, 3)}
CASES = (EVERY, *SIZES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ON_HOPPER = (75, 80, 86, 89, 90)  # whose PTX a Hopper card runs
_GUARD = 256  # elements on either side of the output that must stay untouched
_TARGET = re.compile(r"\.target\s+(\w+)")
_PARAMETERS = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)", re.S)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)")
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6  # CUjit_option


class DriverError(RuntimeError):
    """libcuda is missing or refused a call; the text has its words."""


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


def pack(ptx: str, args) -> list:
    """The arguments as ctypes values, one for each parameter of the text's kernel: tensors as addresses.

    Triton appends pointers to scratch memory that this kernel does not use: they get nulls. ValueError when
    there are too many arguments, or when one that is missing is no pointer.
    """
    parameters = _PARAMETER.findall(_PARAMETERS.search(ptx)[1])  # "u64", "u32", ...
    if len(args) > len(parameters) or not all(p.endswith("64") for p in parameters[len(args) :]):
        raise ValueError(f"{len(args)} arguments do not fit the kernel's parameters {', '.join(parameters)}")
    values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
    values += [0] * (len(parameters) - len(args))
    kinds = (ctypes.c_uint64 if kind.endswith("64") else ctypes.c_uint32 for kind in parameters)
    return [kind(value) for kind, value in zip(kinds, values, strict=True)]


def run_ptx(built: cross_compile.Built, programs: int, args) -> None:
    """Launch the kernel of a PTX text on the device of its first tensor argument, on torch's current stream.

    args: CUDA tensors and ints in the kernel's order. Returns when it is done. Raises DriverError, or
    ValueError for arguments that do not fit.
    """
    values = pack(built.ptx, args)
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type != "cuda":
        raise ValueError(f"the kernel's tensors must be on an NVIDIA GPU, got {device}")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        function = _function(built.ptx, built.name, device.index)
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream, threads = torch.cuda.current_stream().cuda_stream, 32 * built.num_warps
        code = _driver().cuLaunchKernel(
            function, programs, 1, 1, threads, 1, 1, built.shared, stream, addresses, None
        )
        _check(code, f"launching {built.name}")
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


def _examine(case: str, built, layer, module) -> dict:
    """What the foreign kernel gets wrong of a layer: elements, how many of them differ, a sentence or ""."""
    arch, state = built.request["arch"], layer.weight.quant_state
    n, device = math.prod(state.shape), layer.weight.device
    around = torch.full((n + 2 * _GUARD,), math.nan, dtype=state.dtype, device=device)
    out = around[_GUARD:-_GUARD].view(state.shape)
    (programs, *_), arguments = compile_spec.launch_arguments(layer.weight, state, out, arch, module)
    run_ptx(built, programs, arguments)
    differing = protocol.different(out, protocol.expected(layer))
    outside = int((~torch.cat([around[:_GUARD], around[-_GUARD:]]).isnan()).sum())
    target = _TARGET.search(built.ptx)[1]  # sm_90a is an sm_90
    fault = f"{case}, {dtype_name(state.dtype)}, {'nested' if state.nested else 'flat'}, {target}: "
    fault += f"{differing} differ, {outside} written outside the output"
    wrong = differing or outside or not target.startswith(f"sm_{arch}")
    return {"elements": n, "differing": differing, "fault": fault if wrong else ""}


def prove(device="cuda", arch: int = 75, dtypes=DTYPES, module=None) -> dict:
    """Run the kernel's sm_`arch` PTX on `device` and compare every bit with bitsandbytes.

    Every packed byte under every absmax code, a random layer, odd tails; nested and flat, in each of
    `dtypes`; outputs filled with NaN first and guarded on both sides. module: what holds the kernel (default:
    helpers.nf4.kernel). Returns "passed", "arch", "device" and "cases"; "passed" is None where "needs" says
    what is missing.
    """
    needs = "an NVIDIA GPU"
    if environment.has_gpu():
        needs = f"a card of sm_{arch} or newer" if environment.capability(device) < divmod(arch, 10) else ""
        needs = needs or ("" if environment.version_of("bitsandbytes") else "bitsandbytes")
    if needs:
        return {"passed": None, "arch": arch, "needs": needs, "cases": []}
    kinds = list(itertools.product(dtypes, (True, False), CASES))
    layers = [_layer(case, dtype, nested, device) for dtype, nested, case in kinds]
    requests = [
        cross_compile.request_of(dtype, nested, arch, math.prod(layer.weight.quant_state.shape))
        for (dtype, nested, _), layer in zip(kinds, layers, strict=True)
    ]
    kernels = [built.or_raise() for built in cross_compile.build(requests, module=module)]
    cases = [
        _examine(case, built, layer, module or nf4_kernel)
        for (_, _, case), built, layer in zip(kinds, kernels, layers, strict=True)
    ]
    capability = "".join(map(str, environment.capability(device)))
    return {
        "passed": not any(case["fault"] for case in cases),
        "arch": arch,
        "device": f"{torch.cuda.get_device_name(device)} (sm_{capability})",
        "cases": cases,
    }


def summary(proof: dict) -> str:
    """What `prove` returned, in a few lines."""
    arch, cases = proof["arch"], proof["cases"]
    if proof["passed"] is None:
        return f"PTX compiled for sm_{arch}: not run (needs {proof['needs']})"
    triton, bitsandbytes = map(environment.version_of, ("triton", "bitsandbytes"))
    differing, elements = (sum(case[name] for case in cases) for name in ("differing", "elements"))
    return "\n".join([
        f"PTX compiled for sm_{arch} by Triton {triton}, run through the driver on {proof['device']}:",
        f"{differing} of {elements} elements differ from bitsandbytes {bitsandbytes} in {len(cases)} cases: "
        f"{'every bit equal' if proof['passed'] else 'NOT equal'}",
        *(f"  {case['fault']}" for case in cases if case["fault"]),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the proof for each card asked for. 1 when a bit differs, 2 where nothing could run."""
    parser = argparse.ArgumentParser(prog="python -m helpers foreign-ptx", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ON_HOPPER), help="75: a T4's sm_75")
    proofs = [prove(arch=arch) for arch in parser.parse_args(argv).arch]
    print("\n".join(map(summary, proofs)))
    verdicts = {proof["passed"] for proof in proofs}
    return 1 if False in verdicts else 0 if True in verdicts else 2
