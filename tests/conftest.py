import contextlib
import importlib
import importlib.util
import os
import sys

import pytest

from helpers import machine

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core
    for threads in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(threads, "1")
machine.prepare()  # before anything imports triton
# All processes of all tests share a cache of compiled code.
for variable, name in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
    os.environ.setdefault(variable, str(machine.ROOT / "build" / "cache" / name))
# Inductor imports setuptools, which refuses to come after the standard library's distutils.
with contextlib.suppress(ImportError):
    importlib.import_module("setuptools")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Tests share the cores, but not a GPU: some tests count its memory and launches."""
    return 0 if machine.has_gpu() else min(4, os.cpu_count() or 1)


def pytest_collection_modifyitems(items):
    if machine.no_gpu():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU of sm_75 or newer"))


@pytest.fixture
def kernel_module(tmp_path):
    """kernel_module(name): the cells of the kernel and the launch path as one module of that name, as in a
    notebook, with its own operator."""
    from helpers.puzzle import notebook

    def load(name):
        text = "import os\nimport torch\n"  # from the notebook's first cell
        for file in notebook.MODULES[:6]:  # to operators.py
            for cell in notebook.cells_of_module(file, machine.ROOT):
                text += f"\n{cell.source}\n"
        text = text.replace('"nf4_triton::dequantize"', f'"{name}::dequantize"')
        text = text.replace("torch.ops.nf4_triton.", f"torch.ops.{name}.")
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def full_disk():
    """No file grows beyond 8 KiB. Not on Windows."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="session")
def device():
    """'cuda' where there is a GPU, else 'cpu' (the kernel then runs in Triton's interpreter)."""
    from helpers.puzzle.layers import DEVICE

    return DEVICE


@pytest.fixture(scope="session")
def make_layer():
    """helpers.puzzle.layers.quantized_layer; skips where bitsandbytes is absent."""
    pytest.importorskip("bitsandbytes")
    from helpers.puzzle.layers import quantized_layer

    return quantized_layer
