"""Short QLoRA runs with the kernel and without, to be compared bit for bit: PEFT and Unsloth.

training.in_new_process makes a list of them: Unsloth must be imported first and changes other libraries for
good.
"""

import functools
import hashlib
import os

import torch
import torch._inductor.config

from helpers import machine
from helpers.bench import training

SIZES = dict(
    model_type="llama", hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=320,  # the tokenizer's, and a few more
)  # fmt: skip
SMALLEST = SIZES | dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16)
KERNELS = {  # names of dequantizing kernels in the profiler, by who launches them
    "ours": ("_your_dequantize_nf4_kernel", "_dequantize_general_kernel"),
    "bitsandbytes": ("kDequantizeBlockwise",),
    "unsloth": ("_nf4_dequant_kernel",),
}


def digest(tensors) -> str:
    """Return the SHA-256 over the bytes of tensors, in hex."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy())
    return total.hexdigest()


def switch_on(way: str, library: str):
    """Switch the kernel on before the model is loaded. Return a context manager.

    way: "with", "without", or "NF4_TRITON=1", which stays on until the process ends.
    """
    if way == "NF4_TRITON=1":
        from nf4_triton import autoload

        os.environ["NF4_TRITON"] = "1"
        autoload.load()  # as bitsandbytes does where the wheel is installed
    return training.variant(library, way)


def load(library, dtype, autocast, flat, lora):
    """Return a random model to train."""
    sizes = SIZES if machine.has_gpu() else SMALLEST
    if library == "unsloth":
        return training.unsloth_model(sizes, dtype)
    return training.peft_model(
        sizes,
        autocast=autocast is not None,
        lora=training.LORA | lora,
        nf4=training.FLAT if flat else training.NF4,
        dtype=dtype,
        attn_implementation="eager",  # repeats bit for bit on every card
    )


def train(
    way: str, library="peft", autocast=None, flat=False, compiled=False, steps=50, rows=4, length=64, **lora
) -> dict:
    """Train a random model with the kernel switched on in this way, then merge and dequantize it (PEFT).

    autocast: a dtype's name, of the model, too; else it is bf16. flat: scales are not quantized (PEFT).
    Returns what must not depend on the kernel as "same", Switch.calls, and on a GPU the launches of
    dequantizing kernels in one more step.
    """
    from nf4_triton import Switch

    autocast = getattr(torch, autocast) if autocast else None
    # Otherwise Inductor picks a kernel's settings by timing them, and sums depend on the pick.
    picked = torch._inductor.config.patch("triton.autotune_pointwise", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with switch_on(way, library), picked:
        model = load(library, autocast or torch.bfloat16, autocast, flat, lora)
        same = {"packed": digest(one for one in model.parameters() if hasattr(one, "quant_state"))}
        record = {"same": same}
        seed = torch.Generator().manual_seed(3407)
        batches = torch.randint(3, model.config.vocab_size, (steps, rows, length), generator=seed)
        trainer = training.Trainer(torch.compile(model) if compiled else model, autocast, lr=1e-3)
        results = []
        for ids in batches.to(trainer.device):
            loss, *gradients = trainer.results(ids)
            results.append((loss.item(), digest(gradients)))
            trainer.optimizer.step()
        same["losses"], same["gradients"] = zip(*results, strict=True)
        if machine.has_gpu():
            record["launches"] = launches(trainer, ids)
        same["adapters"] = digest(one for one in model.parameters() if one.requires_grad)
        record["counts"] = Switch().calls if way != "without" else {}
        if library == "peft":
            merged = model.merge_and_unload()
            same["merged"] = digest(merged.parameters())
            same["dequantized"] = digest(merged.dequantize().parameters())
    return record


def launches(trainer, ids) -> dict[str, int]:
    """Return the number of dequantizing kernels that a step launches, by library."""
    names = [event.name for event in training.gpu_events(functools.partial(trainer.backward, ids))]
    return {
        who: sum(kernel in name for name in names for kernel in kernels) for who, kernels in KERNELS.items()
    }


def train_all(setups: list[dict]) -> list[dict]:
    """Return `train` of each setup."""
    if any(setup["library"] == "unsloth" for setup in setups):
        # Unsloth splits its loss into chunks by free memory: always one, so that runs can be compared.
        os.environ |= {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    return [train(**setup) for setup in setups]
