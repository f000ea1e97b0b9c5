"""doctor: check this machine (GPU, versions, correctness, what use_nf4_kernel() takes over, speed) and say
what to do. bench: time the kernel beside bitsandbytes and Unsloth at several sizes; takes a minute.

The exit status is 0 if the kernel works here, 1 if it does not.
"""

import argparse
import importlib
import importlib.util
import os
import sys

from . import __version__, environment

LIBRARIES = ("unsloth", "axolotl", "transformers", "peft")  # Unsloth wants to be imported first
SHOWN = (*environment.PACKAGES, "unsloth_zoo", "accelerate", "trl", "axolotl")
VARIABLES = ("NF4_TRITON", "NF4_BACKEND", "NF4_FORCE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
UNTIL_THEN = (
    "Until then dequantize() uses PyTorch: bit-identical, slower. "
    "To check the kernel without a GPU, set TRITON_INTERPRET=1 before Python starts."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("nf4_triton", description=__doc__)
    parser.add_argument("command", choices=["doctor", "bench"])
    command = parser.parse_args(arguments).command
    try:
        return doctor() if command == "doctor" else bench()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def bench() -> int:
    """Time the kernel beside the libraries at several sizes. Return the exit status."""
    missing = [name for name in ("torch", "bitsandbytes") if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"{missing[0]} is not installed: pip install {missing[0]}."
    else:
        problem = environment.cannot_run() or environment.no_gpu()
    if problem:
        print(f"Nothing to time: {problem}")
        return 1
    import_libraries()
    from . import speed

    print(f"A call and a synchronize on one {environment.gpu_name()}:")
    print(speed.verdict(speed.compare()))
    return 0


def import_libraries() -> None:
    """Import what is installed of LIBRARIES, and say what cannot be imported."""
    for name in LIBRARIES:
        try:
            if importlib.util.find_spec(name):
                importlib.import_module(name)
        except Exception as error:  # the others can still be switched
            print(f"{name} cannot be imported: {type(error).__name__}: {error}")


def doctor(more: str = "") -> int:
    """Print what is here, whether the kernel works, and what to do. Return the exit status.

    more: a last line if it works.
    """
    print(f"nf4_triton {__version__}")
    try:
        print_facts()
        problem = check_kernel() or check_switch()
    except Exception as error:  # whatever is broken here is the answer
        problem = f"{type(error).__name__}: {error}"
    if problem:
        print(f"It does not work here: {problem}")
        return 1
    if more:
        print(more)
    return 0


def print_facts() -> None:
    """Print the versions, the environment variables that matter, and the GPUs."""
    versions = environment.versions(SHOWN).items()
    print(", ".join(f"{name} {version or '(not installed)'}" for name, version in versions))
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    print(f"Environment: {', '.join(found) or 'none of ' + ', '.join(VARIABLES)}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    facts = environment.describe()
    gpus = f"{torch.cuda.device_count()}, {facts['card']}" if facts["card"] else "none"
    print(f"GPU: {gpus}; driver {facts['driver']}, CUDA {facts['cuda']}; CPU: {facts['cpu']}")
    if newer := environment.newer_than_tested():
        print(newer)


def check_kernel() -> str | None:
    """Dequantize a small weight to each dtype. Return what is wrong and what to do, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install torch."
    import torch

    from . import backend, reference, state

    backend.choose(None)  # raises for an unknown NF4_BACKEND
    if problem := environment.cannot_run():
        return f"{problem} {UNTIL_THEN}"
    from . import launch_general

    device = torch.device("cpu" if environment.interpreted() else "cuda")
    for dtype in state.DTYPES:
        packed = small_weight(device, dtype)
        if not reference.same_bits(launch_general.dequantize_packed(packed), reference.dequantize(packed)):
            return f"{dtype}: the kernel is not bit-exact here: please report it."
    print("The kernel is bit-identical to PyTorch in float16, bfloat16, and float32.")
    return None


def small_weight(device, dtype):
    """Return 64 x 64 packed weights: every byte, nested scales."""
    import torch

    from . import state

    codes = torch.arange(2048, device=device).to(torch.uint8)
    floats = torch.linspace(0.1, 1.1, 256, device=device, dtype=torch.float32)
    return state.Packed(
        weight=codes.view(-1, 1),
        absmax=codes[:64],
        code2=floats,
        absmax2=floats[:1],
        offset=floats[9],
        shape=(64, 64),
        dtype=dtype,
        quant_type="nf4",
        blocksize=64,
        blocksize2=256,
        nested=True,
    )


def check_switch() -> str | None:
    """Print what use_nf4_kernel() takes over and how fast it is. Return what is wrong, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        print("dequantize() works here. use_nf4_kernel() has nothing to replace: pip install bitsandbytes")
        return None
    import_libraries()
    todo = "Do: use a GPU. Without one the kernel gains nothing: NF4_BACKEND=torch is faster."
    if environment.has_gpu():
        from . import speed

        # Before the switch replaces what it is compared with.
        todo = speed.verdict(speed.compare(sizes=[(4096, 4096)], rounds=300))

    from . import use_nf4_kernel

    with use_nf4_kernel(quiet=True) as switch:
        print(switch)
        if "kernel" not in switch.report.values():
            return "no function of a library can be replaced."
    print(todo)
    return None


if __name__ == "__main__":
    sys.exit(main())
