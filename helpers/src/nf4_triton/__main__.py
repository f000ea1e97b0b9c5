"""doctor: check this machine (GPU, versions, correctness, what use_nf4_kernel() takes over, speed) and say
what to do. bench: time the kernel beside bitsandbytes and Unsloth at several sizes; takes a minute.

The exit status is 0 if the kernel works here, 1 if it does not.
"""

import argparse
import importlib
import importlib.util
import sys

from . import __version__, environment

LIBRARIES = ("unsloth", "axolotl", "transformers", "peft")  # Unsloth wants to be imported first


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser("nf4_triton", description=__doc__)
    parser.add_argument("command", nargs="?", default="help", choices=["doctor", "bench", "help"])
    parser.add_argument("-V", "--version", action="version", version=__version__)
    command = parser.parse_args(arguments).command
    if command == "help":
        parser.print_help()
        return 0
    return bench() if command == "bench" else doctor()


def bench() -> int:
    """Time the kernel beside the libraries at several sizes. Return the exit status."""
    from . import backend

    problem = environment.no_gpu() or backend.cannot_run()
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = "bitsandbytes is not installed: pip install bitsandbytes"
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


def doctor(fix: str = "pip install torch triton", more: str = "") -> int:
    """Print what is here, whether the kernel works, and what to do. Return the exit status.

    fix: what installs torch and Triton; more: a last line if it works.
    """
    print(f"nf4_triton {__version__}")
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"It does not work here: {' and '.join(missing)} not installed.\nDo: {fix}")
        return 1
    try:
        facts = environment.describe()
        versions = facts["versions"].items()
        print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions))
        print(f"GPU: {facts['card'] or 'none'}, driver {facts['driver']}, CUDA {facts['cuda']}")
        problem = check_kernel() or check_switch()
    except Exception as error:  # whatever is broken here is the answer
        problem = f"{type(error).__name__}: {error}"
    if problem:
        print(f"It does not work here: {problem}")
        print("Until then dequantize() uses PyTorch (NF4_BACKEND=auto): bit-identical, slower.")
        return 1
    if more:
        print(more)
    return 0


def check_kernel() -> str | None:
    """Dequantize a small weight to each dtype. Return what is wrong, or None."""
    import torch

    from . import backend, kernel, state

    device = torch.device("cpu" if kernel.INTERPRETED else "cuda")
    if problem := backend.cannot_run():
        return f"{problem} To check correctness without a GPU, set TRITON_INTERPRET=1 before Python starts."
    for dtype in state.DTYPES:
        if problem := backend.why_not_triton(device, dtype):
            return f"{dtype}: {problem}"
    print("The kernel is bit-identical to PyTorch in float16, bfloat16, and float32.")
    return None


def check_switch() -> str | None:
    """Print what use_nf4_kernel() takes over and how fast it is. Return what is wrong, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        print("dequantize() works here. use_nf4_kernel() has nothing to patch: pip install bitsandbytes")
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
        if not switch.libraries:
            return "no library can be switched"
        print(f"It works here{' in part' if switch.partial else ''}.")
    print(todo)
    return None


if __name__ == "__main__":
    sys.exit(main())
