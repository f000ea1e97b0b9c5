import importlib.machinery
import sys
import types

import pytest
import torch


@pytest.fixture(autouse=True)
def restored(own_bitsandbytes, monkeypatch):
    """Afterwards the libraries have their own functions."""
    import switching

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield
    monkeypatch.undo()
    switching.switch.restore()
    assert switching.untouched()
    torch._dynamo.reset()
    for site in switching.sites():
        site.calls.clear()  # which remember what was compiled


@pytest.fixture
def fake_module(monkeypatch):
    """fake_module(name, **contents): an imported module of that name, in packages, until the test ends."""

    def make(name, kind=types.ModuleType, **contents):
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            make(package, __path__=[])
        module = kind(name)
        vars(module).update(contents, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def logged(caplog):
    """logged(): what the package logged since the last call."""
    caplog.set_level("INFO")

    def read():
        text = "".join(f"{message}\n" for message in caplog.messages)
        caplog.clear()
        return text

    return read
