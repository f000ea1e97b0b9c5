import fcntl
import os
import pickle
from unittest import mock

import pytest

T4 = [("fp16",), ("bf16",), ("fp32",), ("bf16", False), ("fp16", True, True), ("bf16", True, True)]
T4 += [("bf16", True, False, changed) for changed in ({"stage": False, "hints": False}, {"no_such": 1})]


@pytest.fixture(scope="session")
def codes(tmp_path_factory):
    """{str(variant): Code} of what the gate compiles: once for all test processes."""
    from helpers.t4 import compile, sass

    variants = [compile.Variant(75, *kind) for kind in T4]
    variants += [compile.Variant(arch, "bf16") for arch in sass.CARDS if arch != 75]
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of all workers
    with open(folder / "machine_code.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "machine_code.pickle"
        if not path.exists():
            with mock.patch.dict(os.environ, TRITON_INTERPRET="1", NF4_FORCE="t4"):  # must change nothing
                path.write_bytes(pickle.dumps(compile.build(variants)))
    return {code.name: code for code in map(sass.Code, pickle.loads(path.read_bytes()))}
