import pytest

from helpers.puzzle import protocol


@pytest.fixture(scope="session", autouse=True)
def large_tiles(kernel):
    """Triton's interpreter takes a quarter of the time with larger tiles."""
    if protocol.ON_GPU:
        yield
    else:
        with kernel.force(words=64, words_small=64):
            yield


@pytest.fixture(scope="session")
def candidate():
    """The kernel's function as the package has it."""
    from nf4_triton import launch

    return launch.your_dequantize_nf4
