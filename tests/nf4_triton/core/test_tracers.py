"""A process's first call into each launch module, inside each tracer."""

import re

import pytest

import processes

pytest.importorskip("bitsandbytes")
START = """
import torch, torch._dynamo, torch._inductor.compile_fx, torch.export  # once, not in each process
from helpers import machine
machine.prepare()
from nf4_triton import dequantize
from nf4_triton.core import launch, operators
import sys
sys.path.append("tests/nf4_triton")
from states import exact, random_state

class Layer(torch.nn.Module):
    def forward(self, packed):
        return call(packed, state)

layer = Layer()
ROOMS = {  # function, options of random_state
    "puzzle": (launch._your_dequantize_nf4, {}),
    "package, the puzzle's layout": (dequantize, {}),
    "package, flat": (dequantize, {"nested": False}),
}
"""
TRACERS = {
    "torch.compile": "result = torch.compile(layer, backend='aot_eager', fullgraph=True)(weight)",
    "export": "result = torch.export.export(layer, (weight,)).module()(weight)",
    "export, strict": "result = torch.export.export(layer, (weight,), strict=True).module()(weight)",
    "make_fx": """
from torch.fx.experimental.proxy_tensor import make_fx
result = make_fx(layer)(weight)(weight)
""",
    "make_fx, fake": """
from torch.fx.experimental.proxy_tensor import make_fx
result = make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(weight)(weight)
""",
    "FakeTensorMode": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    assert layer(mode.from_tensor(weight)).shape == (64, 64)
result = layer(weight)
""",
    "jit.trace": "result = torch.jit.trace(layer, (weight,), check_trace=False)(weight)",
    "vmap": """
ones = torch.ones(1, dtype=torch.float16, device=weight.device)
result = torch.func.vmap(lambda x: call(weight, state) * x)(ones)[0]
""",
    "inference mode": """
with torch.inference_mode():
    result = layer(weight)
""",
}


# Each tracer gets its own process, forked after the imports and before the first call.
FORK = """
import itertools, os, traceback
for (room, (call, options)), (name, code) in itertools.product(ROOMS.items(), TRACERS.items()):
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            weight, state = random_state((64, 64), torch.float16, **options)
            exec(code, globals())
            print(f"<{room}: {name}> exact: {exact(result, weight, state)}", flush=True)
        except BaseException:
            print(f"<{room}: {name}> {traceback.format_exc()[-2000:]}", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def printed():
    """The output of all processes."""
    without_cuda = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # or a fork fails: CUDA is started
    return processes.python(["-c", f"TRACERS = {TRACERS!r}\n{START}\n{FORK}"], variables=without_cuda).out


@pytest.mark.parametrize("name", TRACERS)
def test_the_first_call_of_a_process(printed, name):
    found = re.findall(rf"<(?:puzzle|package.*): {name}> (.*(?:\n[^<].*)*)", printed)
    assert found == ["exact: True"] * 3
