"""Compile Triton kernels for a card that is not here.

A process with TRITON_INTERPRET=1 cannot compile, and Unsloth's kernel file needs stand-ins for the package
around it: these compiles happen in `python -m helpers.t4.cross_compile`, which reads and writes JSON.
Requests: {"source": "ours" | "unsloth", "arch": 75, "out_dtype": "float16", "nested": true, ...}.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import torch

from helpers.machine import child
from helpers.machine.environment import ROOT, version_of
from helpers.nf4 import kernel as nf4_kernel
from helpers.record.names import dtype_name
from helpers.t4 import compile_spec, load_order, machine_code
from helpers.t4.cards import CARDS
from helpers.t4.compile_spec import LARGE

CACHE = ROOT / "build" / "triton-cache"  # of every compile in a child process
DTYPES = ("float16", "bfloat16", "float32")
# Unsloth chooses its T4 launch by Triton's version: 3.7 brought a table of its own for (7, 5).
UNSLOTH_TABLES = ("3.6.0", "3.7.0")


class CompileError(RuntimeError):
    """The kernel did not compile; the text is the compiler's."""


@dataclass(frozen=True)
class Built:
    """One compiled kernel, or the reason why there is none (`error`)."""

    request: dict
    ptx: str = ""
    cubin: bytes = b""
    name: str = ""  # of the entry point
    num_warps: int = 0
    shared: int = 0  # bytes per block
    elements: float = 0.0  # outputs of one thread
    constexprs: dict = dataclasses.field(default_factory=dict)
    versions: dict = dataclasses.field(default_factory=dict)  # triton, and unsloth's where it is the source
    error: str = ""

    def or_raise(self) -> "Built":
        """Itself. Raises CompileError where it did not compile."""
        if self.error:
            raise CompileError(self.error)
        return self

    @functools.cached_property
    def counted(self) -> tuple[tuple[machine_code.Instruction, ...], dict]:
        """machine_code.count of it. Raises machine_code.ToolMissing."""
        card, threads = CARDS[self.request["arch"]], 32 * self.num_warps
        return machine_code.count_cubin(card, self.cubin, self.shared, threads, self.elements)

    @functools.cached_property
    def order(self) -> load_order.Order:
        """Order of loads; of our kernel only, whose arguments it knows. Raises machine_code.ToolMissing."""
        return load_order.read(self.counted[0], self.request["arch"])


def build(requests: list[dict], pythonpath: str | None = None, module=None) -> list[Built]:
    """Compile each request; failures come back as Built.error.

    pythonpath: a folder searched before the installed packages (another Triton). module: what holds the
    kernel (default: helpers.nf4.kernel; a live notebook passes its own, compiled in its own process). Raises
    CompileError when a child process itself fails, or where `module` cannot be compiled in this process.
    """
    ours = all(request["source"] == "ours" for request in requests)
    interpreted = "TRITON_INTERPRET" in os.environ
    if module is not None and interpreted:
        raise CompileError("Triton's interpreter is in use here: only helpers.nf4.kernel can be compiled")
    here = ours and not (pythonpath or interpreted)
    return _answers(requests, module or nf4_kernel) if here else _in_child(requests, pythonpath)


def request_of(out_dtype, nested: bool, arch: int, numel: int = LARGE, **force) -> dict:
    """The request for one kernel of ours, with the settings it would choose on such a card.

    out_dtype: torch dtype or its name. force: other values for fields of Settings (hints=False, asm=False).
    """
    name = dtype_name(out_dtype)
    if name not in DTYPES:
        raise ValueError(f"out_dtype must be one of {', '.join(DTYPES)}, got {out_dtype!r}")
    kind = {"out_dtype": name, "nested": nested, "numel": numel, "force": force}
    return {"source": "ours", "arch": arch} | kind


def _in_child(requests: list[dict], pythonpath: str | None) -> list[Built]:
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    if pythonpath:
        variables["PYTHONPATH"] = os.pathsep.join([pythonpath, str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        arguments = ["-m", "helpers.t4.cross_compile", str(answer)]
        stdin = msgspec.json.encode(requests).decode()
        done = child.python(arguments, variables=variables, stdin=stdin, check=False)
        if not answer.exists():
            raise CompileError(f"the compile process failed:\n{done.err[-2000:]}")
        return msgspec.json.decode(answer.read_bytes(), type=list[Built])


def _compile(request, spec, elements, **versions) -> Built:
    """The answer to a request: `spec` compiled for its card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(spec["fn"], spec["signature"], spec["constexprs"], spec["attrs"])
    target = GPUTarget("cuda", request["arch"], 32)
    compiled = triton.compile(source, target=target, options=spec["options"])
    names, constexprs = list(spec["signature"]), spec["constexprs"].items()
    return Built(
        request,
        compiled.asm["ptx"],
        compiled.asm["cubin"],
        compiled.metadata.name,
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        elements,
        {names[path[0]]: value for path, value in constexprs if isinstance(value, int | str)},
        {"triton": triton.__version__} | versions,
    )


def _build_ours(request, module) -> Built:
    """Our kernel, with the settings that its own code chooses for a card of this architecture."""
    chosen = compile_spec.card_settings(request["arch"], module)
    chosen = dataclasses.replace(chosen, **request.get("force", {}))
    dtype, numel = getattr(torch, request["out_dtype"]), request.get("numel", LARGE)
    spec = compile_spec.compile_spec(dtype, request["nested"], numel, chosen, module)
    words = spec["constexprs"][spec["fn"].arg_names.index("WORDS"),]
    return _compile(request, spec, 8 * words)


def _unsloth_module(table: str, arch: int):
    """Unsloth's kernels/nf4.py alone, as it behaves on a card of `arch` with Triton `table`.

    `import unsloth` takes long and wants a GPU: stand-ins take the place of the packages around the file, and
    its torch operators are not registered. For a process that imports nothing else of Unsloth's.
    """
    import triton
    from packaging.version import Version

    folder = Path(importlib.util.find_spec("unsloth").submodule_search_locations[0]) / "kernels"
    package, zoo, utils = map(types.ModuleType, ("unsloth_kernels", "unsloth_zoo", "unsloth_zoo.utils"))
    package.__path__, zoo.__path__, utils.Version = [str(folder)], [], Version
    sys.modules.update({module.__name__: module for module in (package, zoo, utils)})
    sys.modules.pop("unsloth_kernels.nf4", None)
    unregistered = {name: lambda *a, **k: lambda fn: fn for name in ("triton_op", "custom_op")}
    with (
        mock.patch.object(triton, "__version__", table),
        mock.patch.multiple(torch.library, **unregistered),
    ):
        module = importlib.import_module("unsloth_kernels.nf4")
    module._capability = lambda index: divmod(arch, 10)
    return module


def _build_unsloth(request, _) -> Built:
    """Unsloth's fused kernel for nested states, exactly as its own launcher would specialize it."""
    module = _unsloth_module(request["table"], request["arch"])
    size, meta = request["numel"], functools.partial(torch.empty, device="meta")
    codes = (meta(length, dtype=torch.uint8) for length in (size // 2, size // 64))  # weight, absmax
    floats, out = meta(256), meta(size, dtype=getattr(torch, request["out_dtype"]))
    launch = compile_spec.Launch()
    with mock.patch.object(torch.cuda, "current_device", lambda: 0), contextlib.suppress(compile_spec.Launch):
        module._launch(launch, *codes, floats, floats, floats, floats, 64, 256, out, fp_fusion=False)

    kernel, pointers = module._nf4_dequant_kernel, compile_spec.POINTERS | {torch.uint8: "*u8"}
    constexprs = {name: value for name, value in launch.named.items() if name in kernel.arg_names}
    options = {name: value for name, value in launch.named.items() if name not in kernel.arg_names}
    signature, attrs = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for position, (name, value) in enumerate(zip(kernel.arg_names, launch.arguments, strict=False)):
        pointer = isinstance(value, torch.Tensor)
        signature[name] = pointers[value.dtype] if pointer else "i32"
        if pointer or value % 16 == 0:
            attrs[position,] = [["tt.divisibility", 16]]
    spec = {
        "fn": kernel,
        "signature": signature,
        "constexprs": {(kernel.arg_names.index(name),): value for name, value in constexprs.items()},
        "attrs": attrs,
        "options": options,
    }
    # A program is ROWS blocks of 2 * HALF elements, whatever lanes its stores repeat.
    elements = constexprs["ROWS"] * constexprs["HALF"] * 2 / (32 * options["num_warps"])
    return _compile(request, spec, elements, unsloth=version_of("unsloth"))


def _answers(requests: list[dict], module) -> list[Built]:
    """The answer to each request, or the error it raised."""
    answers = []
    for request in requests:
        try:
            builder = {"ours": _build_ours, "unsloth": _build_unsloth}[request["source"]]
            answers.append(builder(request, module))
        except Exception as error:
            answers.append(Built(request, error=f"{type(error).__name__}: {error}"[-3000:]))
    return answers


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read())
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(_answers(asked, nf4_kernel)))
