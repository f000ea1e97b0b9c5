"""The doctor: print what is here, time the kernel, and say what works: the kernel, the switch, the export."""

import importlib
import logging
import os
import statistics
import sys
import time
import warnings
from functools import partial

from . import __version__, environment
from .environment import missing

NEEDED = "torch numpy huggingface_hub safetensors tqdm transformers peft accelerate bitsandbytes".split()
PROJECT = "nf4-triton"
VARIABLES = ("NF4_TRITON", "NF4_BACKEND", "NF4_FORCE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
FAST = "unsloth.kernels.utils"
SIZE = 4096, 4096
ROUNDS = 300


def doctor(what: str | None = None) -> int:
    """Print the versions, the GPU, and what works. Return the exit status: 1 if the kernel does not work.

    what: "export" to ask for that alone. The status is then the export's.
    """
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # `import torch` without numpy
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # without a GPU, it asks for `kernels`
    versions = environment.versions(environment.PACKAGES).items()
    print(f"nf4_triton {__version__}:", ", ".join(f"{name} {found or '-'}" for name, found in versions))
    print("Environment:", {name: os.environ[name] for name in VARIABLES if name in os.environ} or "none")
    variables()
    os.environ.pop("NF4_TRITON", None)  # or the kernel would be timed beside itself
    print("GPU:", answer(gpu)[1])
    questions = (export,) if what else (kernel, switch, export)
    answers = {question.__name__: answer(question) for question in questions}
    for name, (works, text) in answers.items():
        print(f"The {name} {'works' if works else 'does not work here'}: {text}")
    return int(not answers[what or "kernel"][0])


def answer(question) -> tuple[bool, str]:
    """Return whether something works here, and how, or what is missing."""
    try:
        return question()
    except (Exception, SystemExit) as error:  # whatever is broken here is the answer
        return False, f"{type(error).__name__}: {error}"


def variables() -> None:
    """Print which environment variables have no effect, and why."""
    for name in environment.WORDS:
        try:
            environment.word(name)
        except ValueError as error:
            print(error)
    if "NF4_TRITON" in os.environ and not environment.versions([PROJECT])[PROJECT]:
        print("NF4_TRITON has no effect, because the package is not installed: pip install . in its checkout")


def gpu():
    """Describe the GPU and the CPU."""
    facts = {name: value or "none" for name, value in environment.describe().items()}
    return True, "{card}, CUDA {cuda}, driver {driver}; CPU: {cpu}".format(**facts)


def kernel():
    """Compare the kernel's bits with PyTorch's."""
    if problem := missing("torch") or environment.cannot_run():
        return False, problem
    from .backend import choose

    choose(None)  # raises for an unknown NF4_BACKEND
    if problem := missing("bitsandbytes"):
        return True, f"its bits were not compared. {problem}"
    from .core import launch_general, reference
    from .libraries import self_test

    for layout in self_test.LAYOUTS[:2]:  # each compiles
        *layer, expected = self_test.small_layer(self_test.self_test_device(), *layout)
        if not reference.same_bits(launch_general.dequantize_weight(*layer), expected):
            return False, f"its bits differ from plain PyTorch's in {layout}."
    how = "in Triton's interpreter, slowly: use a GPU" if environment.interpreted() else "on the GPU"
    return True, f"bit-identical to plain PyTorch in float16 and bfloat16, {how}."


def switch():
    """Switch the libraries, print what is left to them, and time the kernel beside them."""
    if problem := missing("bitsandbytes"):
        return False, problem
    if not answer(kernel)[0]:
        return False, "it needs the kernel. The libraries keep their own code."
    from .libraries.switch import LIBRARIES, use_nf4_kernel

    installed = [name for name in LIBRARIES if not missing(name)]
    with use_nf4_kernel(*installed, quiet=True) as switched:  # imports them
        for name, why in switched.left.items():
            print(f"Left to the library: {name}: {why}")
    if not environment.interpreted():
        compare()
    names = ", ".join(sorted({name.partition(".")[0] for name in switched.calls}))
    return bool(names), f"it switches {names or 'no library'}. PEFT and transformers use bitsandbytes."


def export():
    """Import what the export needs."""
    if problem := missing(*NEEDED):
        return False, problem
    try:
        importlib.import_module("peft.utils.transformers_weight_conversion")  # it needs transformers 5, too
    except ImportError as error:
        return False, f"{error}: pip install -U transformers peft."
    from .export.export import to_device

    environment.word("NF4_BACKEND")  # raises for an unknown one: the export dequantizes, too
    return True, f"on the {to_device(None).type.upper().replace('CUDA', 'GPU')}."


def compare() -> None:
    """Print how long the kernel and the libraries' own functions take, in turns.

    Unsloth's is called as in its training's forward pass: every result in one buffer.
    """
    import torch
    from bitsandbytes import functional

    from .core import launch_general

    functions = {"this kernel": launch_general.dequantize_weight, "bitsandbytes": functional.dequantize_4bit}
    if FAST in sys.modules:
        functions["Unsloth"] = partial(sys.modules[FAST].fast_dequantize, use_global_buffer=True)
    weight = torch.randn(SIZE, dtype=torch.float16, device="cuda")
    layer = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    seconds: dict = {name: [] for name in functions}
    for name, function in ROUNDS * [*functions.items()]:
        start = time.perf_counter()
        function(*layer)
        torch.cuda.synchronize()
        seconds[name].append(time.perf_counter() - start)
    us = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
    texts = [f"{name} {value:.0f} us ({value / us['this kernel']:.2f}x)" for name, value in us.items()]
    print(f"A call of {SIZE[0]} x {SIZE[1]} in float16, with a synchronize (over the kernel's time):")
    print("  " + ", ".join(texts))
