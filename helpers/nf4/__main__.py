"""python -m nf4_triton doctor: does the kernel work here, and which functions does it take.

Exit status 0 where it works, else 1.
"""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys

LIBRARIES = ("unsloth", "bitsandbytes", "peft", "transformers")


def doctor() -> int:
    """Print what is here, what is switched, and who decodes in one step of one small layer."""
    names = [name for name in ("torch", "triton", *LIBRARIES) if importlib.util.find_spec(name)]
    print(", ".join([f"Python {platform.python_version()}", *map(_with_version, names)]))
    try:
        from . import use_nf4_kernel
        from .backend import cannot_run

        problem = cannot_run()
    except ImportError as error:
        problem = str(error)
    if not problem and "bitsandbytes" not in names:
        problem = "bitsandbytes is not installed, so there is nothing to switch: pip install bitsandbytes"
    if problem:
        print(f"It does not work here: {problem}")
        return 1
    for name in [name for name in LIBRARIES if name in names]:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever ails a library, the others can be switched
            print(f"{name} cannot be imported: {type(error).__name__}: {error}")
    try:
        without = _step()
    except Exception as error:
        print(f"It does not work here: bitsandbytes itself does not: {type(error).__name__}: {error}")
        return 1
    with use_nf4_kernel(quiet=True) as switch:
        print(switch)
        if not switch.sites:
            print("It does not work here.")
            return 1
        same = all(a.equal(b) for a, b in zip(_step(), without, strict=True))
        print(f"One step of a small layer: {switch.summary()}; results {'the same' if same else 'DIFFER'}.")
    print("It works here." if same else "It does not work here: please report it.")
    return 0 if same else 1


def _with_version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} (no version)"


def _step():
    """Output and input gradient of a 4-bit layer of bitsandbytes, 64 tokens."""
    import bitsandbytes
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(128, 128, bias=False, compute_dtype=torch.float16, quant_type="nf4")
    layer = layer.half().to(device)
    x = torch.randn(64, 128, dtype=torch.float16, device=device, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


def main(arguments: list[str]) -> int:
    if arguments != ["doctor"]:
        print(__doc__.strip(), file=sys.stderr if arguments else sys.stdout)
        return 2 if arguments else 0
    return doctor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
