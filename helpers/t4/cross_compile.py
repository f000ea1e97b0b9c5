"""Compile Triton kernels for a card that is not here.

A process with TRITON_INTERPRET=1 cannot compile, and Unsloth's kernel file needs stand-ins for the package
around it: these compiles happen in `python -m helpers.t4.cross_compile`, which reads and writes JSON.
Requests: {"source": "ours" | "unsloth", "arch": 75, "out_dtype": "float16", "nested": true, ...}.
"""

import base64
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from helpers.machine import child
from helpers.machine.environment import ROOT, version_of
from helpers.t4 import load_order, machine_code

CACHE = ROOT / "build" / "triton-cache"  # of every compile in a child process
DTYPES = ("float16", "bfloat16", "float32")
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "uint8": "u8"}
# Unsloth chooses its T4 launch by Triton's version: 3.7 brought a table of its own for (7, 5).
UNSLOTH_TABLES = ("3.6.0", "3.7.0")
SPEC = ("numel", "blocksize", "blocksize2")


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
    constexprs: dict | None = None
    versions: dict | None = None  # triton, and unsloth's where it is the source
    error: str = ""

    def or_raise(self) -> "Built":
        """Itself. Raises CompileError where it did not compile."""
        if self.error:
            raise CompileError(self.error)
        return self

    @functools.cached_property
    def counted(self) -> machine_code.Counted:
        """What a thread executes. Raises machine_code.ToolMissing."""
        return machine_code.count_cubin(
            self.name, self.cubin, self.shared, 32 * self.num_warps, self.elements
        )

    @functools.cached_property
    def order(self) -> load_order.Order:
        """Order of loads; of our kernel only, whose arguments it knows. Raises machine_code.ToolMissing."""
        return load_order.read(self.counted.executed, self.request["arch"])


def build(requests: list[dict], pythonpath: str | None = None, module=None) -> list[Built]:
    """Compile each request; failures come back as Built.error.

    pythonpath: a folder searched before the installed packages (another Triton). module: what holds the
    kernel (default: helpers.nf4.kernel; a live notebook passes its own, compiled in its own process). Raises
    CompileError when a child process itself fails, or where `module` cannot be compiled in this process.
    """
    ours = all(request["source"] == "ours" for request in requests)
    if module is not None and not _can_compile():
        raise CompileError("Triton's interpreter is in use here: only helpers.nf4.kernel can be compiled")
    here = not pythonpath and ours and _can_compile()
    rows = _answers(requests, module) if here else _in_child(requests, pythonpath)
    return [Built(**row | {"cubin": base64.b64decode(row["cubin"])}) for row in rows]


def compile_kernels(kinds: list[tuple], module=None) -> list[Built]:
    """Our kernel in each of `kinds`, with the settings it would choose on such a card. Needs no GPU.

    kinds: (out_dtype, nested, arch, overrides), as request_of takes them. Raises CompileError where one does
    not compile, ValueError for an unknown dtype.
    """
    requests = [request_of(*kind) for kind in kinds]
    keys = [json.dumps(request, sort_keys=True) for request in requests]
    different = dict(zip(keys, requests, strict=True))
    built = dict(zip(different, build(list(different.values()), module=module), strict=True))
    return [built[key].or_raise() for key in keys]


def request_of(out_dtype, nested: bool, arch: int, overrides: dict) -> dict:
    """The request for one kernel of ours.

    out_dtype: torch dtype or its name. overrides: `numel`, `blocksize`, `blocksize2` as compile_spec takes
    them; everything else replaces fields of Settings (hints=False, asm=False).
    """
    spec = {name: value for name, value in overrides.items() if name in SPEC}
    force = {name: value for name, value in overrides.items() if name not in SPEC}
    kind = {"out_dtype": _name(out_dtype), "nested": nested, "force": force}
    return {"source": "ours", "arch": arch} | kind | spec


def _name(dtype) -> str:
    """ "float16" of torch.float16 or of "float16"."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"out_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def _can_compile() -> bool:
    """Whether kernels compile in this process: Triton is here, as itself and not as its interpreter."""
    return "TRITON_INTERPRET" not in os.environ and importlib.util.find_spec("triton") is not None


def _in_child(requests: list[dict], pythonpath: str | None) -> list[dict]:
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    if pythonpath:
        variables["PYTHONPATH"] = os.pathsep.join([pythonpath, str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        arguments = ["-m", "helpers.t4.cross_compile", str(answer)]
        done = child.python(arguments, variables=variables, stdin=json.dumps(requests), check=False)
        if not answer.exists():
            raise CompileError(f"the compile process failed:\n{done.err[-2000:]}")
        return json.loads(answer.read_text())


def _compile(request, spec, elements, constexprs, versions) -> dict:
    """The answer to a request: `spec` compiled for its card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(spec["fn"], spec["signature"], spec["constexprs"], spec["attrs"])
    target = GPUTarget("cuda", request["arch"], 32)
    compiled = triton.compile(source, target=target, options=spec["options"])
    metadata = compiled.metadata
    return {
        "request": request,
        "ptx": compiled.asm["ptx"],
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
        "name": metadata.name,
        "num_warps": metadata.num_warps,
        "shared": metadata.shared,
        "elements": elements,
        "constexprs": {name: value for name, value in constexprs.items() if isinstance(value, int | str)},
        "versions": {"triton": triton.__version__} | versions,
    }


def _build_ours(request, module=None) -> dict:
    """Our kernel, with the settings that its own code chooses for a card of this architecture."""
    import torch

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.t4 import compile_spec

    module = module or nf4_kernel
    chosen = compile_spec.card_settings(request["arch"], module)
    spec = compile_spec.compile_spec(
        getattr(torch, request["out_dtype"]),
        request["nested"],
        settings=dataclasses.replace(chosen, **request.get("force", {})),
        module=module,
        **{name: request[name] for name in SPEC if name in request},
    )
    names = list(spec["signature"])
    constexprs = {names[path[0]]: value for path, value in spec["constexprs"].items()}
    return _compile(request, spec, 8 * constexprs["WORDS"], constexprs, {})


class _Recorder:
    """Stands where Unsloth's launcher expects the kernel: kernel[grid](...) notes what would be launched."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *args, **named):
        self.args, self.named = args, named


def _unsloth_module(table: str, arch: int):
    """Unsloth's kernels/nf4.py alone, as it behaves on a card of `arch` with Triton `table`.

    `import unsloth` takes long and wants a GPU: stand-ins take the place of the packages around the file, and
    its torch operators are not registered.
    """
    import torch
    import triton
    from packaging.version import Version

    installed = importlib.util.find_spec("unsloth")
    if "unsloth" not in sys.modules:
        root = Path(installed.submodule_search_locations[0])
        for name, path in (("unsloth", root), ("unsloth.kernels", root / "kernels")):
            package = types.ModuleType(name)
            package.__path__, package.__spec__ = [str(path)], installed
            sys.modules[name] = package
        zoo, utils = types.ModuleType("unsloth_zoo"), types.ModuleType("unsloth_zoo.utils")
        zoo.__path__, utils.Version = [], Version
        sys.modules["unsloth_zoo"], sys.modules["unsloth_zoo.utils"] = zoo, utils
    sys.modules.pop("unsloth.kernels.nf4", None)
    unregistered = {name: lambda *a, **k: lambda fn: fn for name in ("triton_op", "custom_op")}
    with (
        mock.patch.object(triton, "__version__", table),
        mock.patch.multiple(torch.library, **unregistered),
    ):
        module = importlib.import_module("unsloth.kernels.nf4")
    module._capability = lambda index: divmod(arch, 10)
    return module


def _build_unsloth(request, module=None) -> dict:
    """Unsloth's fused kernel exactly as its own launcher would specialize it for these sizes."""
    import torch

    module = _unsloth_module(request["table"], request["arch"])
    size, nested = request["size"], request["nested"]

    def meta(length, dtype):
        return torch.empty(length, dtype=dtype, device="meta")

    weight, floats = meta(size // 2, torch.uint8), meta(256, torch.float32)
    absmax = meta(size // 64, torch.uint8 if nested else torch.float32)
    second = (floats, floats, floats) if nested else (None, None, None)
    recorder, out = _Recorder(), meta(size, getattr(torch, request["out_dtype"]))
    with mock.patch.object(torch.cuda, "current_device", lambda: 0):
        module._launch(recorder, weight, absmax, *second, floats, 64, 256, out, fp_fusion=False)

    kernel = module._nf4_dequant_kernel
    options = {k: v for k, v in recorder.named.items() if k not in kernel.arg_names}
    constexprs = {k: v for k, v in recorder.named.items() if k in kernel.arg_names}
    signature, attrs = {}, {}
    for position, (name, value) in enumerate(zip(kernel.arg_names, recorder.args, strict=False)):
        pointer = isinstance(value, torch.Tensor)
        dtype = str(value.dtype).removeprefix("torch.") if pointer else ""
        signature[name] = "*" + TRITON_TYPES[dtype] if pointer else "i32"
        if pointer or value % 16 == 0:
            attrs[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constexprs, "constexpr")
    spec = {
        "fn": kernel,
        "signature": {name: signature[name] for name in kernel.arg_names},
        "constexprs": {(kernel.arg_names.index(name),): value for name, value in constexprs.items()},
        "attrs": attrs,
        "options": options,
    }
    # A program is ROWS blocks of 2 * HALF elements, whatever lanes its stores repeat.
    elements = constexprs["ROWS"] * constexprs["HALF"] * 2 / (32 * options["num_warps"])
    return _compile(request, spec, elements, constexprs, {"unsloth": version_of("unsloth")})


def _answers(requests: list[dict], module=None) -> list[dict]:
    """The answer to each request, or the error it raised, in JSON types."""
    rows = []
    for request in requests:
        try:
            builder = {"ours": _build_ours, "unsloth": _build_unsloth}[request["source"]]
            rows.append(builder(request, module))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            rows.append({"request": request, "cubin": "", "error": text[-3000:]})
    return rows


def main(argv: list[str]) -> int:
    """Read requests from standard input, write the answers to the file named in argv[0]."""
    Path(argv[0]).write_text(json.dumps(_answers(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
