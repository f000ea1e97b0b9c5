"""The puzzle's MLPs, and quantized layers for the notebook's checks, the benchmarks, and the tests."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from nf4_triton.core.settings import INTERPRETED

# %% The puzzle's layers and MLP id="layers" folded=true
import collections

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}

Config = collections.namedtuple("Config", "batch seq hidden intermediate seed dtype")
LESS = 1 if ON_GPU else 16  # small layers for Triton's interpreter
CONFIGS = (
    Config(2, 3333 // LESS, 2048 // LESS, 8192 // LESS, 3407, torch.float16),
    Config(5, 777 // LESS, 1024 // LESS, 4096 // LESS, 3409, torch.bfloat16),
    Config(3, 2048 // LESS, 4096 // LESS, 14336 // LESS, 3408, torch.bfloat16),
)
LARGE = (4096, 14336) if ON_GPU else (128, 64)  # in and out features


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    """Return a Linear4bit with a random (m, hd) weight in double-quantized NF4."""
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(hd, m, bias=None, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    layer.to(DEVICE)  # quantizes the weight
    layer.weight.quant_state.dtype = dtype
    return layer


class MLP(torch.nn.Module):
    """Gate, up, and down projections with SiLU, as in Llama."""

    def __init__(self, hd=4096, m=14336, dtype=torch.float16):
        super().__init__()
        self.gate_proj = bnb_Linear4bit(hd, m, dtype)
        self.up_proj = bnb_Linear4bit(hd, m, dtype)
        self.down_proj = bnb_Linear4bit(m, hd, dtype)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def build(config):
    """Return (MLP, input) of a configuration, drawn from its seed in the puzzle's order."""
    from transformers import set_seed

    set_seed(config.seed)
    torch.set_default_dtype(torch.float32)
    mlp = MLP(config.hidden, config.intermediate, config.dtype)
    X = torch.randn(config.batch, config.seq, config.hidden, dtype=config.dtype, device=DEVICE)
    return mlp, X


def many_layers(config):
    """Return (layers that together exceed a GPU's cache, MLP, input) of a configuration."""
    count = 220_000_000 // (config.hidden * config.intermediate)
    layers = [bnb_Linear4bit(config.hidden, config.intermediate, config.dtype) for _ in range(count)]
    return layers, *build(config)


def mlp_forward(X, mlp, fx):
    """Return the MLP's output, computed with the weights that `fx` returns for its layers."""
    up = X @ fx(mlp.up_proj).t()
    gate = X @ fx(mlp.gate_proj).t()
    return (torch.nn.functional.silu(gate) * up) @ fx(mlp.down_proj).t()


def assert_correct_bnb(layer, dtype):
    """Check that a layer is double-quantized NF4 with blocks of 64 and 256, dequantized to `dtype`."""
    state, second = layer.weight.quant_state, layer.weight.quant_state.state2
    assert layer.weight.dtype == state.absmax.dtype == torch.uint8
    assert state.code.dtype == state.offset.dtype == second.absmax.dtype == second.code.dtype == torch.float32
    assert (state.dtype, state.blocksize, second.blocksize) == (dtype, 64, 256)


# %% tags=["module-only"]
def quantized_layer(in_features, out_features, dtype, nested=True, device=DEVICE, seed=3407, **more):
    """Return a Linear4bit of any kind: its (out, in) weight is standard normal, its output dtype `dtype`.

    more: arguments of Params4bit; NF4 in blocks of 64 by default.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, device=device)
    layer = Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype, device="meta")
    how = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": nested} | more
    layer.weight = Params4bit(weight, requires_grad=False, **how)
    layer.to(device)  # quantizes the weight
    layer.weight.quant_state.dtype = dtype
    return layer
