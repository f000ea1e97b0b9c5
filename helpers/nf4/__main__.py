"""usage: nf4_triton doctor | --version | --help     (also: python -m nf4_triton ...)

doctor      check this machine: GPU, versions, correctness, what use_nf4_kernel() takes over, speed,
            and what to do. Exit status 0 if the kernel works here, 1 if it does not.
--version   print the version
--help      print this text
"""

import importlib
import importlib.util
import statistics
import sys
import time
import types

from . import __version__, environment

NEEDED = ("torch", "triton", "bitsandbytes")
LIBRARIES = ("unsloth", "bitsandbytes", "peft", "transformers")  # in the order of import that Unsloth wants


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["doctor"]:
        return doctor()
    if arguments == ["--version"]:
        print(__version__)
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"nf4_triton: unknown command {' '.join(arguments)!r}, expected doctor", file=sys.stderr)
        return 2
    print(__doc__.strip())
    return 0


def doctor(fix: str = "", more: str = "") -> int:
    """Print what is here, whether the kernel works, and what to do. Return 0 if it works, else 1.

    fix: what installs a missing package, if not pip; more: a last line if it works.
    """
    print(f"nf4_triton {__version__}")
    print(", ".join(f"{name} {have or 'not installed'}" for name, have in environment.versions().items()))
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"It does not work here: {', '.join(absent)} not installed.")
        print(f"Do: {fix or 'pip install ' + ' '.join(absent)}")
        return 1
    try:
        problem = _check()
    except Exception as error:  # whatever is broken here is the answer
        problem = f"{type(error).__name__}: {error}"
    if problem:
        print(f"It does not work here: {problem}")
        if not environment.has_gpu():
            print("To check correctness without a GPU, set TRITON_INTERPRET=1 before Python starts.")
        print("Until then `dequantize` uses PyTorch (NF4_BACKEND=auto): bit-identical, slower.")
    elif more:
        print(more)
    return 1 if problem else 0


def _check() -> str | None:
    """Print all findings; return why the kernel does not work here, or None."""
    facts = environment.describe()
    sm = "sm_{}{}".format(*facts["capability"]) if facts["capability"] else "no GPU"
    bf16 = "native bf16" if environment.native_bf16() else "no native bf16 (the kernel rounds with integers)"
    card = f"{facts['card']}, {sm}, {bf16}, driver {facts['driver']}" if facts["card"] else "none"
    print(f"GPU: {card}; CUDA {facts['cuda'] or 'not in this torch'}")
    from . import backend, launch

    if problem := backend.cannot_run():
        return problem
    import torch

    from . import use_nf4_kernel

    device = torch.device("cpu" if environment.interpreter() else "cuda")
    problems = {dtype: backend.why_not_triton(device, dtype) for dtype in launch.DTYPES}
    for dtype, problem in problems.items():
        print(f"{str(dtype)[6:]}: {problem or 'bit-identical to PyTorch'}")
    if any(problems.values()):
        return "see above"
    for name in LIBRARIES:
        try:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
        except Exception as error:  # the others can still be switched
            print(f"{name} cannot be imported: {type(error).__name__}: {error}")
    speed = _speed() if device.type == "cuda" else {}  # before the switch replaces what is compared
    without = _step(device)
    with use_nf4_kernel(quiet=True) as switch:
        print(switch)
        if not switch.libraries:
            return "no library can be switched"
        same = all(map(torch.equal, _step(device), without))
        print(f"One step of a small layer: {switch.summary()}; results {'the same' if same else 'DIFFER'}.")
    if not same:
        return "the results differ: please report it"
    ours, *others = speed.items() or [("", 0)]
    for name, seconds in others:
        print(f"Speed, 4096 x 4096 bf16: {ours[1] * 1e6:.0f} us, {name} {seconds * 1e6:.0f} us: "
              f"{seconds / ours[1]:.2f}x")  # fmt: skip
    print(f"It works here{' in part' if switch.partial else ''}.")
    if not speed:
        print("Do: use a GPU. Without one the kernel gains nothing: NF4_BACKEND=torch is faster.")
    elif all(seconds > ours[1] for _, seconds in others):
        print("Do: call use_nf4_kernel() before training. NF4_BACKEND=auto, the default, uses the kernel.")
    else:
        print("Do: time your own training with and without use_nf4_kernel(): it was not faster in this test.")
    return None


def _step(device) -> tuple:
    """Return output and input gradient of a 4-bit layer of bitsandbytes, 64 tokens, fp16."""
    import bitsandbytes
    import torch

    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(128, 128, bias=False, compute_dtype=torch.float16, quant_type="nf4")
    layer = layer.half().to(device)
    x = torch.randn(64, 128, dtype=torch.float16, device=device, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


def _speed() -> dict[str, float]:
    """Return the median seconds of a call and a synchronize, for this kernel and for the libraries."""
    import torch
    from bitsandbytes import functional

    from . import launch, reference

    layer = reference.quantized_layer(4096, 4096, torch.bfloat16, device="cuda")
    unsloth = sys.modules.get("unsloth.kernels.utils", types.SimpleNamespace())
    contenders = {
        "this kernel": launch._your_dequantize_nf4,
        "Unsloth": getattr(unsloth, "fast_dequantize", None),
        "bitsandbytes": functional.dequantize_4bit,
    }
    times = {name: [] for name, function in contenders.items() if function}
    for _ in range(300):
        for name in times:
            start = time.perf_counter()
            contenders[name](layer.weight.data, layer.weight.quant_state)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[50:]) for name, seconds in times.items()}


if __name__ == "__main__":
    sys.exit(main())
