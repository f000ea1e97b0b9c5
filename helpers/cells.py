"""The one source of the kernel: the cells tagged `kernel` of the notebook, loaded as a real module."""

import functools
import hashlib
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

NOTEBOOK = Path(__file__).resolve().parent.parent / "Unsloth_Puzzles_A.ipynb"
TAG = "kernel"
MODULE = "nf4_kernel_cells"
# inspect finds the source through the loader; a name ending in .ipynb would send it to the real file instead.
FILENAME = "Unsloth_Puzzles_A.kernel_cells.py"


@functools.cache
def source() -> str:
    """The tagged cells' text, in order, as one module. Raises ValueError if the notebook has none."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    tagged = ["".join(cell["source"]) for cell in cells if TAG in cell["metadata"].get("tags", ())]
    if not tagged:
        raise ValueError(f"{NOTEBOOK.name} has no cell tagged '{TAG}', where the kernel lives: restore it")
    return "\n\n".join(tagged) + "\n"


def kernel_hash() -> str:
    """First 16 hex digits of the SHA-256 of source(): what every stored result is stamped with."""
    return hashlib.sha256(source().encode()).hexdigest()[:16]


class _Loader(importlib.abc.InspectLoader):
    def get_source(self, fullname):
        return source()

    def get_code(self, fullname):
        return compile(source(), FILENAME, "exec")


def load() -> ModuleType:
    """The kernel cells as a module, the same object at every call. It needs torch and triton only;
    TRITON_INTERPRET=1 must be set before the first call to run in Triton's interpreter."""
    if MODULE not in sys.modules:
        spec = importlib.util.spec_from_loader(MODULE, _Loader(), origin=FILENAME)
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[MODULE]
            raise
    return sys.modules[MODULE]
