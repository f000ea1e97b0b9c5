"""The section experts of `python -m helpers bench`: GPU time to dequantize some experts of a stack.

A graph holds one call for each of many disjoint sets of experts, so every call finds the L2 cache cold. Every
contender can be captured.
"""

from collections.abc import Callable, Iterator

import torch

from helpers.bench import contenders, gpu
from helpers.bench.contenders import why
from helpers.puzzle.layers import DEVICE, quantized_layer
from nf4_triton import dequantize

STACKS = (  # (experts, out, in)
    (128, 1536, 2048),  # Qwen3 30B-A3B, gate and up
    (128, 2048, 768),  # the same, down
    (256, 1024, 2048),  # Qwen3.5 35B-A3B, gate and up
    (32, 5760, 2880),  # gpt-oss 20B, gate and up
)
ACTIVE = (4, 8, 32)  # experts of a stack


# --- what each library has ---


def load_axolotl(layer) -> Callable:
    """Return ids -> experts by Axolotl."""
    from axolotl.integrations.kernels.libs.scattermoe_lora.selective_dequant import _selective_dequant_bnb4

    packed, state = layer.weight.data, layer.weight.quant_state
    return lambda ids: _selective_dequant_bnb4(packed, state, ids, state.shape[1:])


def load_zoo(layer) -> Callable:
    """Return ids -> experts by the default path of Unsloth's zoo."""
    from unsloth_zoo.temporary_patches.moe_utils import _dequantize_bnb4bit_experts

    return lambda ids: _dequantize_bnb4bit_experts(layer.weight, ids)


def load_zoo_select(layer) -> Callable:
    """Return ids -> experts by the zoo's operator, which its comparison mode alone uses."""
    from unsloth_zoo.temporary_patches import moe_routed  # noqa: F401  it registers the operator

    operator = torch.ops.unsloth_zoo.nf4_select_dequant
    state, second = layer.weight.quant_state, layer.weight.quant_state.state2
    tensors = (layer.weight.data, state.absmax, second.absmax, second.code, state.offset, state.code)
    rest = (*state.shape[1:], state.blocksize, second.blocksize, True, state.dtype)
    return lambda ids: operator(*tensors, ids, *rest)


LIBRARIES = {"axolotl": load_axolotl, "zoo": load_zoo, "zoo_select": load_zoo_select}


def functions_of(layer) -> dict[str, Callable]:
    """Return {name: ids -> experts} of this kernel and the libraries that are installed; print the others."""
    functions = {"rows": lambda rows: dequantize(layer, rows=rows)}
    for name, load in LIBRARIES.items():
        try:
            functions[name] = load(layer)
        except Exception as error:  # some need a GPU to be imported
            print(f"{name}: not measured ({why(error)})")
    return functions


# --- the section ---


def time_experts(problems: list[str]) -> Iterator[tuple]:
    """Yield GPU time of selected experts of real stacks: 4, 8, 32, and all of them."""
    for experts, out, inputs in STACKS:
        layer = quantized_layer(inputs, experts * out, torch.bfloat16)
        shape = layer.weight.quant_state.shape = torch.Size((experts, out, inputs))  # one state for all
        expected = contenders.exact_weight(layer)
        functions = functions_of(layer)
        order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(3407)).to(DEVICE)
        for active in sorted({*ACTIVE, experts}):
            case = f"{active} of {'x'.join(map(str, shape))}"
            sets = [ids.sort().values for ids in order.split(active)]  # each expert has its turn
            works = gpu.works_of(functions, sets, expected[sets[-1]])
            yield case, "us", gpu.gpu_us(works, problems, case)
