"""Cached launches for the tests of the launch path.

Without a GPU no launch is cached, so numpy_gpu.py stands in for one.
"""

import pytest
import torch

from nf4_triton.core import launch, launch_general
from numpy_gpu import NumpyGPU
from states import exact


class Watched:
    """Calls into a launch module, which tell whether a cached launch was replayed."""

    def __init__(self, module, monkeypatch):
        self.module = module
        self.call = getattr(module, "dequantize_weight", None) or module._your_dequantize_nf4
        self.checked = 0  # calls that no cached launch matched
        first = module.launch_first

        def count(*arguments):
            self.checked += 1
            return first(*arguments)

        monkeypatch.setattr(module, "launch_first", count)

    def __call__(self, *arguments):
        """Return (result, whether a cached launch was replayed)."""
        before = self.checked
        result = self.call(*arguments)
        return result, self.checked == before

    def check(self, weight, state, *out):
        """Fail if the result is not exact. Return whether a cached launch was replayed."""
        result, relaunched = self(weight, state, *out)
        assert exact(result, weight, state)
        return relaunched

    def warm(self, layer):
        """Call until a cached launch is replayed. Return (weight, state)."""
        weight, state = layer.weight, layer.weight.quant_state
        self.check(weight, state)
        assert self.check(weight, state)
        return weight, state


@pytest.fixture
def gpu():
    return NumpyGPU()


@pytest.fixture
def watch(device, monkeypatch, gpu):
    """watch(module): that launch module as Watched, with an empty cache."""

    def forget():
        launch.launches.clear()

    def start(module):
        if device == "cuda" and not launch.CAN_RELAUNCH:
            pytest.skip("with this Triton no launch is cached")
        forget()
        if device == "cpu":
            for room in (launch, launch_general):
                gpu.install(room, monkeypatch)
        return Watched(module, monkeypatch)

    yield start
    forget()


@pytest.fixture(params=[launch, launch_general], ids=["puzzle", "general"])
def watched(request, watch):
    """Each launch module as Watched: the puzzle's, and the package's entry on top of it."""
    return watch(request.param)


@pytest.fixture
def general(watch):
    """The package's entry as Watched."""
    return watch(launch_general)


@pytest.fixture
def layer(watched, make_layer):
    """64 x 320 in bf16: 320 scales, two absmax2. FP4 for the general kernel."""
    quant_type = "nf4" if watched.module is launch else "fp4"
    return make_layer(64, 320, torch.bfloat16, quant_type=quant_type)


@pytest.fixture(params=[False, True], ids=["first", "warm"])
def case(request, watched, layer):
    """(watched, plain weight, state), before and after a launch was cached."""
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    if request.param:
        watched.check(weight, state)
        assert watched.check(weight, state)
    return watched, weight, state
