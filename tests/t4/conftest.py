import fcntl
import os

import pytest


@pytest.fixture(scope="session")
def codes(tmp_path_factory):
    """Everyone's machine code, as `python -m helpers sass` collects it: once for all test processes."""
    import msgspec

    from helpers.t4 import sass

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with open(folder / "machine_code.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "machine_code.json"
        if not path.exists():
            path.write_bytes(msgspec.json.encode(sass.MachineCode(code=sass.collect())))
    return msgspec.json.decode(path.read_bytes(), type=sass.MachineCode).code
