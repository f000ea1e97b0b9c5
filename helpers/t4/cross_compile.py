"""Compile Triton kernels for a card that is not here.

A process with TRITON_INTERPRET=1 cannot compile, and Unsloth's kernel file needs stand-ins for the package
around it: these compiles happen in `python -m helpers.t4.cross_compile`, which reads and writes JSON.
Requests: {"source": "ours" | "unsloth", "arch": 75, "out_dtype": "float16", "nested": true, ...}.
"""

import base64
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from helpers.machine.environment import version_of

ROOT = Path(__file__).resolve().parents[2]
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "uint8": "u8"}
# Unsloth chooses its T4 launch by Triton's version: 3.7 brought a table of its own for (7, 5).
UNSLOTH_TABLES = ("3.6.0", "3.7.0")


@dataclass(frozen=True)
class Built:
    """One compiled kernel: PTX text, cubin, launch facts, or the reason why there is none."""

    request: dict
    ptx: str = ""
    cubin: bytes = b""
    name: str = ""  # of the entry point
    num_warps: int = 0
    shared: int = 0  # bytes per block
    constexprs: dict | None = None
    versions: dict | None = None  # triton, and unsloth's where it is the source
    error: str = ""


class CompileError(RuntimeError):
    """The kernel did not compile; the text is the compiler's."""


def build(requests: list[dict], pythonpath: str | None = None) -> list[Built]:
    """Compile each request, in one child process unless this one can; failures come back as Built.error.

    pythonpath: a folder searched before the installed packages (another Triton). Raises CompileError when the
    child process itself fails.
    """
    here = not pythonpath and _can_compile() and all(request["source"] == "ours" for request in requests)
    rows = _answers(requests) if here else _in_child(requests, pythonpath)
    return [Built(**row | {"cubin": base64.b64decode(row["cubin"])}) for row in rows]


def _can_compile() -> bool:
    """Whether kernels compile in this process: Triton is here, as itself and not as its interpreter."""
    return "TRITON_INTERPRET" not in os.environ and importlib.util.find_spec("triton") is not None


def _in_child(requests: list[dict], pythonpath: str | None) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if pythonpath:
        environment["PYTHONPATH"] = os.pathsep.join([pythonpath, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", "helpers.t4.cross_compile", str(answer)],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        if not answer.exists():
            raise CompileError(f"the compile process failed:\n{done.stderr[-2000:]}")
        return json.loads(answer.read_text())


def _compile(fn, signature, constexprs, attrs, options, arch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _answer(request, compiled, constexprs, versions) -> dict:
    import triton

    metadata = compiled.metadata
    return {
        "request": request,
        "ptx": compiled.asm["ptx"],
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
        "name": metadata.name,
        "num_warps": metadata.num_warps,
        "shared": metadata.shared,
        "constexprs": {name: value for name, value in constexprs.items() if isinstance(value, int | str)},
        "versions": {"triton": triton.__version__} | versions,
    }


def _build_ours(request) -> dict:
    """The notebook's kernel, with the settings its own code chooses for a card of this architecture."""
    import torch

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.t4 import compile_spec

    module, arch = nf4_kernel, request["arch"]
    spec_keys = request.keys() - {"source", "arch", "out_dtype", "nested", "force"}
    with module.force(**decisions(module, arch) | request.get("force", {})):
        spec = compile_spec.compile_spec(
            getattr(torch, request["out_dtype"]),
            request["nested"],
            settings=module.settings(),
            **{key: request[key] for key in spec_keys},
        )
    compiled = _compile(*(spec[key] for key in ("fn", "signature", "constexprs", "attrs", "options")), arch)
    names = list(spec["signature"])
    constexprs = {names[path[0]]: value for path, value in spec["constexprs"].items()}
    return _answer(request, compiled, constexprs, {})


def decisions(module, arch: int) -> dict:
    """Arguments for the kernel cells' `force` that make them decide as on a card of this architecture."""
    if arch == 75:
        return {"card": "t4", "asm": True}
    native = arch >= 80
    return {
        "asm": True,
        "int_bf16": not native,
        "hint_loads": not native,
        "stage": native,
        "capability": divmod(arch, 10),
    }


class _Recorder:
    """Stands where Unsloth's launcher expects the kernel: kernel[grid](...) notes what would be launched."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *args, **named):
        self.args, self.named = args, named


@functools.cache
def _unsloth_root() -> Path:
    return Path(importlib.util.find_spec("unsloth").submodule_search_locations[0])


def _unsloth_module(table: str, arch: int):
    """Unsloth's kernels/nf4.py alone, as it behaves on a card of `arch` with Triton `table`.

    `import unsloth` takes long and wants a GPU: stand-ins take the place of the packages around the file, and
    its torch operators are not registered.
    """
    import torch
    import triton
    from packaging.version import Version

    root = _unsloth_root()
    for name, path in (("unsloth", root), ("unsloth.kernels", root / "kernels")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
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
    module._capability = lambda index: (arch // 10, arch % 10)
    return module


def _build_unsloth(request) -> dict:
    """Unsloth's fused kernel exactly as its own launcher would specialize it for these sizes."""
    import torch

    module = _unsloth_module(request["table"], request["arch"])
    elements, nested = request["elements"], request["nested"]
    out_dtype = getattr(torch, request["out_dtype"])

    def meta(length, dtype):
        return torch.empty(length, dtype=dtype, device="meta")

    weight = meta(elements // 2, torch.uint8)
    absmax = meta(elements // 64, torch.uint8 if nested else torch.float32)
    floats = meta(256, torch.float32)
    recorder = _Recorder()
    second = (floats, floats, floats) if nested else (None, None, None)
    out = meta(elements, out_dtype)
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
    paths = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    signature = {name: signature[name] for name in kernel.arg_names}
    compiled = _compile(kernel, signature, paths, attrs, options, request["arch"])
    facts = constexprs | {"blocks": recorder.grid[0]}
    return _answer(request, compiled, facts, {"unsloth": version_of("unsloth")})


def _answers(requests: list[dict]) -> list[dict]:
    """The answer to each request, or the error it raised, in JSON types."""
    rows = []
    for request in requests:
        try:
            builder = {"ours": _build_ours, "unsloth": _build_unsloth}[request["source"]]
            rows.append(builder(request))
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
