"""Try for_unsloth.patch on a copy of the installed Unsloth: compare the bits, print times before and after.

python docs/for_unsloth.py    (needs a GPU; the installed package stays as it is)
"""

import collections
import contextlib
import hashlib
import importlib.util
import itertools
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from helpers.bench import clocks  # noqa: E402
from helpers.puzzle import layers, protocol  # noqa: E402
from nf4_triton.core.reference import same_bits  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
B200 = (1024, 2, True, True, 2)  # Unsloth's settings for more than 65,536 bytes


def patched_copy(folder):
    """Copy the installed package into a folder, with the patch's lines at the end of its nf4.py."""
    installed = importlib.util.find_spec("unsloth")
    if installed is None:
        sys.exit("Not tried: Unsloth is not installed")
    package = shutil.copytree(Path(installed.origin).parent, Path(folder) / "unsloth")
    nf4 = package / "kernels" / "nf4.py"
    if hashlib.sha256(nf4.read_bytes()).hexdigest() not in (HERE / "for_unsloth.md").read_text():
        sys.exit("Not tried: the patch is for the nf4.py of Unsloth 2026.10.9")
    _, _, _, *added = (HERE / "for_unsloth.patch").read_text().splitlines(keepends=True)
    with nf4.open("a") as file:
        file.writelines(line[1:] for line in added)


def forms(weight):
    """Yield a weight as it is, transposed, as a plain tensor, misaligned, and in each quant_storage."""
    codes = weight.data
    yield from (weight, weight.t(), codes, torch.cat([codes[:1], codes])[1:])
    for dtype in DTYPES:
        yield codes.view(-1).view(dtype).view(-1, 1)


def in_every_state_of_torch(check):
    """Call check() without and with no_grad, inference mode, and autocast, then in a backward pass."""
    autocast = torch.autocast("cuda", torch.float16)
    for state in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode(), autocast):
        with state:
            check()
    x = torch.ones((), device="cuda", requires_grad=True)
    x.register_hook(lambda _: check())
    (x * 1).backward()


def compare(check):
    """Call check(layer, weight) for what Unsloth takes, on every GPU while each is the current one."""
    devices = range(torch.cuda.device_count())
    for dtype, nested, device, current in itertools.product(DTYPES, (True, False), devices, devices):
        with torch.cuda.device(current):
            for seed in range(3):  # a layer is likely to get the memory of the one before
                layer = layers.quantized_layer(64, 320, dtype, nested, f"cuda:{device}", seed)
                for weight in forms(layer.weight):
                    in_every_state_of_torch(partial(check, layer, weight))
            state = layer.weight.quant_state
            for name, new in ("absmax", state.absmax.flip(0)), ("dtype", torch.float32), ("shape", (20479,)):
                setattr(state, name, new)
                for _ in range(3):
                    check(layer, layer.weight)


def medians(calls, count, rounds):
    """Return the microseconds of each call: medians of `rounds` turns of `count` calls."""
    timers = {name: clocks.host_timer(call, count) for name, call in calls.items()}
    return {name: statistics.median(us) for name, us in clocks.in_turns(timers, rounds).items()}


def time_in_turns(contenders):
    """Return the time until a call returns, and the seconds of the puzzle's test, as text."""
    layer = layers.quantized_layer(4096, 1024, torch.bfloat16)
    us = medians({name: partial(call, layer) for name, call in contenders.items()}, 100, 20)
    seconds = collections.Counter()
    for config in layers.OFFICIAL:
        mlp, x = layers.build(config)
        calls = {name: partial(protocol.mlp_dequantize, x, mlp, call) for name, call in contenders.items()}
        seconds.update({name: 100e-6 * us for name, us in medians(calls, 100, 5).items()})
    lines = [f"{name:12}{us[name]:6.1f} us{seconds[name]:8.4f} s" for name in contenders]
    return "\n".join(["Until a call returns (1024x4096, bf16), and the puzzle's test (100 rounds):", *lines])


def main():
    import unsloth  # noqa: F401  it asks to come first
    from unsloth.kernels import nf4, triton_launch, utils

    nf4._CONFIGS.pop((9, 0))  # (a) is the override below
    today, kept = nf4._launch_by_key, nf4.dequantize_nf4

    def dequantize(function, settings, layer, weight=None):
        utils.dequantize_nf4, nf4._CONFIG_OVERRIDE = function, settings
        return utils.fast_dequantize(layer.weight if weight is None else weight, layer.weight.quant_state)

    def check(*weight):
        expected = dequantize(today, None, *weight)
        for settings in (None, B200):
            torch.full_like(expected, torch.nan)  # freed at once: a result is likely to get this memory
            assert same_bits(dequantize(kept, settings, *weight), expected)

    with mock.patch.object(nf4, "_relaunch", wraps=nf4._relaunch) as relaunch:
        compare(check)
    forms = {"today": (today, None), "(a)": (today, B200), "(b)": (kept, None), "(a) and (b)": (kept, B200)}
    times = time_in_turns({name: partial(dequantize, *form) for name, form in forms.items()})
    assert relaunch.called and triton_launch._ENABLED and utils._USE_NF4_KERNELS, "an error, or nothing kept"
    print(f"The same bits; {relaunch.call_count} kept launches repeated. {times}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        patched_copy(folder)
        sys.path.insert(0, folder)
        main()
