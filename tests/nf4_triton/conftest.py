import pytest


@pytest.fixture(scope="module")
def own_bitsandbytes():
    """Skip where Unsloth, imported in this process, has changed bitsandbytes and transformers."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if functional.dequantize_4bit.__module__ != functional.__name__:
        pytest.skip("Unsloth changed other libraries in this process: run this folder by itself")
