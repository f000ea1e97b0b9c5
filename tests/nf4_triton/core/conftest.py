"""Kept launches for the tests of the launch path.

Without a GPU nothing is kept, so a GPU made of numpy stands in: numpy_gpu.py.
"""

import pytest
import torch

from nf4_triton.core import launch, launch_general
from numpy_gpu import NumpyGPU
from states import exact


class Watched:
    """Calls of a launch room, each with whether a kept launch was used."""

    def __init__(self, module, monkeypatch):
        self.module = module
        self.call = getattr(module, "dequantize_weight", None) or module._your_dequantize_nf4
        self.checked = 0  # calls for which no kept launch fit
        first = module.launch_first

        def count(*arguments):
            self.checked += 1
            return first(*arguments)

        monkeypatch.setattr(module, "launch_first", count)

    def __call__(self, *arguments):
        """Return (result, whether it was launched again)."""
        before = self.checked
        result = self.call(*arguments)
        return result, self.checked == before

    def check(self, weight, state, *out):
        """Fail if the result is not exact. Return whether it was launched again."""
        result, relaunched = self(weight, state, *out)
        assert exact(result, weight, state)
        return relaunched

    def warm(self, layer):
        """Call until a kept launch is used. Return (weight, state)."""
        weight, state = layer.weight, layer.weight.quant_state
        self.check(weight, state)
        assert self.check(weight, state)
        return weight, state


@pytest.fixture
def gpu():
    return NumpyGPU()


@pytest.fixture
def watch(device, monkeypatch, gpu):
    """watch(module): that launch room as Watched, with nothing kept."""

    def forget():
        launch.launches.clear()

    def start(module):
        if device == "cuda" and not launch.CAN_RELAUNCH:
            pytest.skip("this Triton launches the ordinary way: nothing is kept")
        forget()
        if device == "cpu":
            for room in (launch, launch_general):
                gpu.install(room, monkeypatch)
        return Watched(module, monkeypatch)

    yield start
    forget()


@pytest.fixture(params=[launch, launch_general], ids=["puzzle", "general"])
def watched(request, watch):
    """Each launch room as Watched: the puzzle's alone, and the package's entry on top of it."""
    return watch(request.param)


@pytest.fixture
def general(watch):
    """The package's entry as Watched."""
    return watch(launch_general)


@pytest.fixture
def layer(watched, make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level. FP4 for the package's own kernel."""
    quant_type = "nf4" if watched.module is launch else "fp4"
    return make_layer(64, 320, torch.bfloat16, quant_type=quant_type)


@pytest.fixture(params=[False, True], ids=["first", "warm"])
def case(request, watched, layer):
    """(watched, plain weight, state), before and after a launch was kept."""
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    if request.param:
        watched.check(weight, state)
        assert watched.check(weight, state)
    return watched, weight, state
