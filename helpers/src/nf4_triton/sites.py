"""The library functions that dequantize, their replacements, and the self-tests.

A new library takes one answer and one Site in SITES. An answer takes the original's arguments and returns the
same bits. It returns None to leave the call to the original.
"""

import collections
import contextlib
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch.nn.functional import linear

from . import launch, private
from .kernel import INTERPRETED, TRITON
from .reference import NF4_VALUES, same_bits
from .state import Packed, UnsupportedState, read_state

FAST_DEQUANTIZE = "unsloth.kernels.utils.fast_dequantize"
EXPERT_STACK = "unsloth_zoo.temporary_patches.moe_triton_kernels.nf4_dequant_triton"
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
PRODUCT = "bitsandbytes.autograd._functions.matmul_4bit"
CUDA_OPS = "bitsandbytes.backends.cuda.ops"  # imported only where there is a GPU
FALLBACK = f"{CUDA_OPS}._dequant_linear_fallback"
AXOLOTL = "axolotl.kernels.quantize._ctypes_nf4_dequant"
# Mixtures of experts: these select experts or multiply in kernels of their own, which nothing here replaces.
OWN_KERNELS = (
    "unsloth_zoo.temporary_patches.moe_routed.nf4_select_dequant",
    "unsloth_zoo.temporary_patches.moe_utils._dequantize_bnb4bit_experts",
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora.nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped.nf4_grouped_mm",
    "axolotl.integrations.kernels.libs.scattermoe_lora.selective_dequant._selective_dequant_bnb4",
)
# bitsandbytes makes these tables at their first use, in torch's default dtype of that moment.
TABLES = ("bitsandbytes.functional.name2qmap", "bitsandbytes.backends.utils._code_4bit_cache")
# Of calls: dequantized by the kernel, dequantized by the library, multiplied without dequantizing.
COUNTS = ("kernel", "library", "fused")
# Raised before a launch: full disk, killed ptxas, damaged cache. CUDA errors are RuntimeErrors.
CANNOT_LAUNCH = (OSError, ImportError, subprocess.SubprocessError, triton.TritonError)
MOST_FAILURES = 3  # each may have compiled for seconds
log = logging.getLogger("nf4_triton")
compiling = torch.compiler.is_dynamo_compiling


def dequantized(function: Callable, packed: torch.Tensor, quant_state) -> Iterable:
    """Return what the self-test compares for functions that take (packed, quant_state)."""
    return function(packed, quant_state), function(packed.t(), quant_state)


@dataclass(eq=False)
class Site:
    """A function of a library that dequantizes, and what answers its calls.

    Calls in compiled code are not counted; concurrent threads may miss a few.
    """

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the original
    results: Callable = dequantized  # results(function, packed, quant_state): what the self-test compares
    exists: Callable[[], bool] = lambda: True  # whether this release of the library has it
    replays: bool = False  # whether the original launches faster than Triton's ordinary path
    original: Any = None
    replacement: Any = None  # None: not tested yet, or left to the library
    stopped: str = ""  # why it no longer answers
    failures: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    reasons: collections.Counter = field(default_factory=collections.Counter)

    def dequantize(self, kernel: Callable, *arguments) -> torch.Tensor | None:
        """Return kernel(*arguments), counted, or None if the library has to dequantize."""
        try:
            result = kernel(*arguments)
        except UnsupportedState as error:
            if not compiling():
                self.count_fallback(str(error).split(":")[0])
            return None
        except CANNOT_LAUNCH as error:
            self.count_fallback(self.fail(error))
            return None
        if not compiling():
            self.counts["kernel"] += 1
        return result

    def count_fallback(self, reason: str) -> None:
        self.counts["library"] += 1
        self.reasons[reason] += 1

    def fail(self, error: Exception) -> str:
        """Note a launch that failed, and return why. The first is logged; the last stops this site."""
        why = f"the kernel could not be launched ({type(error).__name__}: {error})"
        self.failures += 1
        if self.failures == 1:
            log.warning("%s falls back to the library: %s", self.name, why)
        if self.failures == MOST_FAILURES:
            self.stopped = why
        return why


# The answers


def fast_dequantize(site, W, quant_state=None, out=None, use_global_buffer=False, *, dtype=None):
    """Answer for Unsloth. The result is a new tensor, as `use_global_buffer` permits; `dtype` is for other
    formats (8 bit, NVFP4, MXFP4), which have other state types."""
    if type(quant_state).__name__ != "QuantState":
        return None
    return site.dequantize(launch._your_dequantize_nf4, W, quant_state, out)


def nf4_dequant_triton(site, packed, quant_state, out_shape=None, *, out=None):
    """Answer for Unsloth's stacks of experts. They are never transposed."""
    return site.dequantize(expert_stack, packed, quant_state, out_shape, out)


def expert_stack(weight, quant_state, out_shape, out):
    packed = read_state(weight.reshape(-1, 1), quant_state)
    if packed.dtype is torch.float16:  # Unsloth's own tests allow it one unit in the last place
        raise UnsupportedState("Unsloth rounds some fp16 experts differently from bitsandbytes")
    if out_shape is not None:
        packed = packed._replace(shape=tuple(out_shape))
    return launch.dequantize_packed(packed, out)


def dequantize_4bit(site, A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    """Answer for bitsandbytes, which reads the other arguments only if there is no quant_state."""
    if quant_state is None:
        return None
    return site.dequantize(launch._your_dequantize_nf4, A, quant_state, out)


def dequant_linear_fallback(
    site, A, B, shapeB, absmax, blocksize, quant_type, bias=None,
    absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """Answer for the branch of bitsandbytes' CUDA operator gemm_4bit that dequantizes and multiplies. It runs
    in compiled graphs, and in eager calls that `matmul_4bit` leaves to the operator."""
    packed = Packed(
        B, absmax, None, None, None, tuple(shapeB), A.dtype, quant_type, blocksize, None, nested=False
    )
    if absmax_8bit is not None:  # then `absmax` scales the scales
        packed = packed._replace(
            absmax=absmax_8bit, code2=absmax_code, absmax2=absmax, offset=absmax_offset,
            blocksize2=256, nested=True,
        )  # fmt: skip
    weight = site.dequantize(launch.dequantize_packed, packed)
    if weight is None:
        return None
    return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)  # here a row is not a transposed weight


def ctypes_nf4_dequant(site, W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Answer for Axolotl, whose LoRA kernels and operator axolotl::nf4_dequantize call it."""
    packed = Packed(
        W, absmax, code2, absmax2, offset, tuple(shape), dtype, "nf4", blocksize, blocksize2, nested=True
    )
    return site.dequantize(launch.dequantize_packed, packed)


def matmul_4bit(site, A, B, quant_state, out=None, bias=None):
    """Answer for bitsandbytes where it dequantizes and multiplies: the same weight into the same `linear`
    (forward) and `matmul` (backward), without the operator's dispatch and two helper kernels."""
    if out is not None or compiling() or not product_applies(A, quant_state, bias):
        return None
    if is_fused(A, quant_state):
        site.counts["fused"] += 1
        return None
    with private.plain_tensors():  # Params4bit answers every method through Python
        column = B.view(-1, 1)
    multiply = Product.apply if A.requires_grad and torch.is_grad_enabled() else product
    try:
        result = multiply(A, column, quant_state, bias)
    except UnsupportedState:
        return None  # the operator then calls FALLBACK or DEQUANTIZE, which counts it
    except CANNOT_LAUNCH as error:
        site.fail(error)
        return None
    site.counts["kernel"] += 1
    return result


def product_applies(A: torch.Tensor, quant_state, bias: torch.Tensor | None) -> bool:
    """Return whether bitsandbytes forms the product of a plain tensor and a weight that was quantized as
    (outputs, inputs), in whole blocks."""
    if type(A) is not torch.Tensor or private.in_transform():
        return False
    if quant_state is None or len(quant_state.shape) != 2:
        return False
    outputs, inputs = quant_state.shape
    return (
        A.numel() > 0
        and A.shape[-1] == inputs
        and inputs % quant_state.blocksize == 0
        and A.is_cuda == (CUDA_OPS in sys.modules)
        and (bias is None or not bias.requires_grad)
        and (not quant_state.nested or quant_state.state2.blocksize == 256)
    )


def is_fused(A: torch.Tensor, quant_state) -> bool:
    """Return whether bitsandbytes takes a fused kernel for so few rows, whose sums round differently."""
    cuda_ops = sys.modules.get(CUDA_OPS)
    if cuda_ops is None:  # on a CPU it always dequantizes
        return False
    outputs, inputs = quant_state.shape
    rows = A.numel() // inputs
    if rows > cuda_ops._gemm_4bit_custom_max_m:
        return False
    return cuda_ops._gemm_4bit_use_custom_fn(A.device.index, A.dtype, rows, outputs, inputs)


def product(A, column, quant_state, bias):
    """Return linear(A, weight, bias) of the weight dequantized to A's dtype, whatever the state's is."""
    packed = read_state(column, quant_state)
    if packed.dtype is not A.dtype:
        packed = packed._replace(dtype=A.dtype)
    return linear(A, launch.dequantize_packed(packed), bias)


class Product(torch.autograd.Function):
    """`product`, and its gradient for A."""

    @staticmethod
    def forward(ctx, A, column, quant_state, bias):
        ctx.column, ctx.quant_state = column, quant_state
        return product(A, column, quant_state, bias)

    @staticmethod
    def backward(ctx, grad):
        weight = current(DEQUANTIZE)(ctx.column, ctx.quant_state)
        return torch.matmul(grad, weight.to(grad.dtype)), None, None, None


# The self-test: what a function, the library's or its replacement, returns for a small layer


def self_test(site: Site, replacement: Callable) -> None:
    """Raise RuntimeError unless a replacement returns the original's bits, and the kernel made them."""
    before = site.counts["kernel"]
    with without_trace(self_test_device()) as device:
        for dtype in (torch.float16, torch.bfloat16):
            try:
                layer = small_layer(dtype, device)
                site.stopped = "its self-test runs"  # the original may wrap an earlier replacement
                expected = site.results(site.original, *layer)
                site.stopped = ""
                same = all(map(same_bits, site.results(replacement, *layer), expected))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"the self-test of {site.name} failed: {problem}") from error
            if not same:
                raise RuntimeError(f"the kernel's {dtype} bits differ from those of {site.name}")
    if site.counts["kernel"] == before:
        raise RuntimeError(f"the kernel refused the self-test of {site.name}")


def self_test_device() -> torch.device:
    """Return the current GPU, or that of LOCAL_RANK if the process has not chosen one yet: a test on GPU 0
    would open a context there for every rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen or (rank if rank < torch.cuda.device_count() else 0))


def local_rank() -> int:
    """Return LOCAL_RANK, the number of this process on its host; 0 if it is missing, empty, or negative."""
    return max(0, int(os.environ.get("LOCAL_RANK") or 0))


@contextlib.contextmanager
def without_trace(device: torch.device) -> Iterator[torch.device]:
    """Run on a device, in float32, outside inference mode, and put bitsandbytes' tables back as they were.

    Models are often created on "meta", with another default dtype, or in inference mode.
    """
    tables = [table for table in map(current, TABLES) if isinstance(table, dict)]
    copies = [table.copy() for table in tables]
    dtype = torch.get_default_dtype()
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        torch.set_default_dtype(torch.float32)
        with guard, device, torch.inference_mode(False), torch.enable_grad():
            yield device
    finally:
        torch.set_default_dtype(dtype)
        for table, copy in zip(tables, copies, strict=True):
            table.clear()
            table.update(copy)


def small_layer(dtype: torch.dtype, device: torch.device) -> tuple:
    """Return (packed, quant_state) of 128 x 192 nested NF4 weights: every byte, two second-level blocks.

    Not quantized, because that would fill the library's tables.
    """
    state = importlib.import_module("bitsandbytes.functional").QuantState
    integers = torch.arange(128 * 96, device=device)
    floats = torch.linspace(-1, 1, 256, dtype=torch.float32, device=device)
    state2 = state(absmax=floats[-2:].clone(), code=floats, blocksize=256, dtype=torch.float32)
    quant_state = state(
        absmax=(integers[:384] * 37).to(torch.uint8),
        shape=torch.Size((128, 192)),
        code=torch.tensor(NF4_VALUES, dtype=torch.float32, device=device),
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.tensor(1.1, dtype=torch.float32, device=device),
        state2=state2,
    )
    return (integers * 37).to(torch.uint8).view(-1, 1), quant_state


def small_input(rows: int, quant_state) -> torch.Tensor:
    inputs = quant_state.shape[1]
    values = torch.linspace(-1, 1, rows * inputs, device=quant_state.absmax.device)
    return values.view(rows, inputs).to(quant_state.dtype)


def stacked(function, packed, quant_state):
    """As 2 experts of 64 x 192."""
    return [function(packed, quant_state, (2, 64, 192))]


def dequantized_from_parts(function, packed, quant_state):
    second = quant_state.state2
    parts = second.code, second.absmax, quant_state.offset, quant_state.blocksize, second.blocksize
    return [function(packed, quant_state.absmax, *parts, quant_state.shape, quant_state.dtype)]


def multiplied_from_parts(function, packed, quant_state):
    x, bias = small_input(64, quant_state), small_input(1, quant_state)[0, :128]
    second = quant_state.state2
    sizes = quant_state.blocksize, quant_state.quant_type
    scales = quant_state.absmax, second.code, quant_state.offset
    return [function(x, packed, quant_state.shape, second.absmax, *sizes, bias, *scales)]


def products_and_gradients(function, packed, quant_state):
    """Of 1, 64, and 2,048 rows: bitsandbytes takes a fused kernel up to some hundred rows, at most 1,536."""
    results = []
    for rows in (1, 64, 2048):
        x = small_input(rows, quant_state).requires_grad_()
        y = function(x, packed, quant_state, bias=small_input(1, quant_state)[0, :128])
        y.backward(y.detach())
        results += [y.detach(), x.grad]
    return results


# The sites


def has_gemm_4bit() -> bool:
    """Return whether this is bitsandbytes 0.50 or newer. Older products call dequantize_4bit."""
    return hasattr(torch.ops.bitsandbytes, "gemm_4bit")


def has_cuda_gemm_4bit() -> bool:
    return CUDA_OPS in sys.modules and has_gemm_4bit()


def has_expert_stack() -> bool:
    try:
        return importlib.util.find_spec(EXPERT_STACK.rpartition(".")[0]) is not None
    except ModuleNotFoundError:  # no unsloth_zoo
        return False


# Per library. Without the first function the library is refused; the others may be left as they are.
SITES = {
    "unsloth": (
        Site(FAST_DEQUANTIZE, fast_dequantize, replays=True),
        Site(EXPERT_STACK, nf4_dequant_triton, stacked, has_expert_stack),
    ),
    "bitsandbytes": (
        Site(DEQUANTIZE, dequantize_4bit),
        Site(FALLBACK, dequant_linear_fallback, multiplied_from_parts, has_cuda_gemm_4bit),
        Site(PRODUCT, matmul_4bit, products_and_gradients, has_gemm_4bit),
    ),
    "axolotl": (Site(AXOLOTL, ctypes_nf4_dequant, dequantized_from_parts),),
}
OLDEST = {"bitsandbytes": "0.46"}  # older ones do not dequantize on every device


def cannot_replay() -> str | None:
    """Return why launches are not replayed here, None if they are, or if the interpreter runs them."""
    if private.CAN_REPLAY or INTERPRETED:
        return None
    versions = f"torch {torch.__version__} and Triton {'.'.join(map(str, TRITON))}"
    return f"launches cannot be replayed with {versions}"


def current(name: str) -> Any:
    """Return what a module refers to by the last part of `name` now, None without the module or the name."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)
