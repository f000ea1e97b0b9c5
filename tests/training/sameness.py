"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`in_new_process` runs a list of them in a process of its own: Unsloth must be imported first and changes other
libraries for good. Run as a file it is that process.
"""

import gc
import os
import tempfile

import torch

from helpers import machine
from helpers.bench import training
from helpers.bench.training import digest
from helpers.puzzle.checks import gpu_events

SIZES = dict(
    hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=320,  # what the tokenizer knows, and some
)  # fmt: skip
SMALLEST = SIZES | dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16)
KERNELS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}


def load(library, family, dtype, autocast, checkpointing, lora):
    """Return a model to train."""
    with tempfile.TemporaryDirectory() as folder:
        training.make_model(folder, family, **(SIZES if machine.has_gpu() else SMALLEST))
        if library == "unsloth":
            return training.unsloth_model(folder, dtype, checkpointing)
        model = training.peft_model(folder, dtype, autocast=autocast is not None, **lora)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def packed_bytes(model) -> str:
    """Return the digest of a model's 4-bit weights, as they were quantized."""
    return digest(one for one in model.parameters() if hasattr(one, "quant_state"))


def train(
    kernel: bool, library="peft", family="llama", dtype="bfloat16", autocast=None, checkpointing=False,
    compiled=False, steps=50, rows=4, length=64, **lora,
) -> dict:  # fmt: skip
    """Train a random model with the kernel or without, then merge and dequantize it (PEFT).

    autocast: a dtype's name. Returns what must not depend on the kernel as "same", Switch.counts(), and on a
    GPU peak_bytes and the launches of dequantizing kernels in one more step.
    """
    dtype, autocast = getattr(torch, dtype), getattr(torch, autocast) if autocast else None
    with training.arm(library, training.ARMS[kernel]) as switch, training.deterministic():
        model = load(library, family, dtype, autocast, checkpointing, lora)
        same = {"packed": packed_bytes(model), "losses": [], "gradients": []}
        trainer = training.Trainer(torch.compile(model) if compiled else model, autocast, lr=1e-3)
        # Counting up from random tokens: something to learn.
        starts = torch.randint(3, 200, (steps, rows, 1), generator=torch.Generator().manual_seed(3407))
        batches = ((starts + torch.arange(length)) % model.config.vocab_size).to(trainer.device)
        record = {}
        if machine.has_gpu():
            torch.cuda.reset_peak_memory_stats()
        for ids in batches:
            same["losses"].append(trainer.backward(ids).item())
            same["gradients"].append(digest(p.grad for p in trainer.adapters))
            trainer.update()
        same["adapters"] = digest(trainer.adapters)
        record["counts"] = switch.counts() if switch else {}
        if machine.has_gpu():
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            record["launches"] = launches(trainer, batches[0])
        if library == "peft":
            merged = model.merge_and_unload()
            same["merged"] = digest(merged.parameters())
            same["dequantized"] = digest(merged.dequantize().parameters())
    return record | {"same": same}


def launches(trainer, ids) -> dict[str, int]:
    """Return how many dequantizing kernels a step launches, by library."""
    names = [name for name, _ in gpu_events(trainer.backward, ids, count=1)]
    trainer.optimizer.zero_grad()
    return {who: sum(kernel in name for name in names) for who, kernel in KERNELS.items()}


def compare(setup: dict) -> dict[str, dict]:
    """Run a setup with the kernel, without, and on a GPU once more without: does it repeat at all?"""
    runs, records = {"with": True, "without": False}, {}
    if machine.has_gpu() and not setup.get("compiled"):
        runs["again"] = False
    for name, kernel in runs.items():
        records[name] = train(kernel, **setup)
        gc.collect()
        if machine.has_gpu():
            torch.cuda.empty_cache()
    return records


def compare_all(setups: list[dict]) -> list[dict]:
    """Return `compare` of each setup."""
    if any(setup["library"] == "unsloth" for setup in setups):
        # Unsloth cuts its loss into as many chunks as free memory allows: one, so that runs compare.
        os.environ |= {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    return [compare(setup) for setup in setups]


def in_new_process(setups: list[dict]) -> list[dict[str, dict]]:
    """Run `compare_all` in one new process without network. Raises ChildFailed with its text."""
    return training.in_new_process(__file__, timeout=900, setups=setups)


if __name__ == "__main__":
    training.answer(compare_all)
