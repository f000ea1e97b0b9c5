"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`in_new_process` runs a list of them in a process of its own: Unsloth must be imported first and changes other
libraries for good. Run as a file it is that process.
"""

import gc
import os
import traceback

import torch

from helpers import machine
from helpers.bench import training
from helpers.bench.training import digest

SMALLEST = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
KERNELS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}


def train(
    kernel: bool, folder, library="peft", dtype="bfloat16", autocast=None, steps=50, compiled=False, rows=4,
    length=64, new_tokens=16, **how,
) -> dict:  # fmt: skip
    """Train a model of make_model with the kernel or without, then generate, merge and dequantize with it.

    autocast: a dtype's name. how: of training.adapted. Returns what must not depend on the kernel as "same",
    Switch.counts(), and on a GPU peak_bytes and the launches of dequantizing kernels in one more step.
    """
    from helpers.puzzle.protocol import gpu_events

    gpu = torch.cuda.is_available()
    same = {"losses": [], "gradients": []}
    record = {"same": same, "counts": {}}
    with training.arm(library, training.ARMS[kernel]) as switch, training.deterministic():
        model = training.adapted(folder, library, dtype, 8, autocast=autocast is not None, **how)
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-3)
        call, device = torch.compile(model) if compiled else model, adapters[0].device
        # Counting up from random tokens: something to learn.
        starts = torch.randint(3, 200, (steps, rows, 1), generator=torch.Generator().manual_seed(3407))
        batches = ((starts + torch.arange(length)) % model.config.vocab_size).to(device)

        def step(ids):
            with torch.autocast(device.type, getattr(torch, autocast or dtype), enabled=autocast is not None):
                loss = call(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        if gpu:
            torch.cuda.reset_peak_memory_stats()
        for ids in batches:
            same["losses"].append(step(ids).item())
            same["gradients"].append(digest(p.grad for p in adapters))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        same["adapters"] = digest(adapters)
        record["counts"] = switch.counts() if switch else {}
        if gpu:
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            names = [name for name, *_ in gpu_events(lambda: step(batches[0]), 1)]
            record["launches"] = {who: sum(one in name for name in names) for who, one in KERNELS.items()}
            optimizer.zero_grad(set_to_none=True)
        if new_tokens:
            if library == "unsloth":
                from unsloth import FastLanguageModel

                FastLanguageModel.for_inference(model)
            model.train(device.type == "cpu")  # eval mode there may repack weights
            prompt = batches[0][:1, :7]
            prompt = dict(input_ids=prompt, attention_mask=torch.ones_like(prompt))
            with torch.no_grad():
                ids = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False, use_cache=True)
            same["tokens"] = ids[0].tolist()
        if library == "peft":
            merged = model.merge_and_unload()
            weights = [p for p in merged.parameters() if hasattr(p, "quant_state")]
            states = [(w, w.quant_state.absmax, w.quant_state.state2.absmax) for w in weights]
            same["merged"] = digest(tensor for state in states for tensor in state)
            same["dequantized"] = digest(merged.dequantize().parameters())
    return record


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
    """Return `compare` of each setup, or {"failed": why}."""
    if any(setup["library"] == "unsloth" for setup in setups):
        # Unsloth cuts its loss into as many chunks as free memory allows: one, so that runs compare.
        os.environ |= {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    results = []
    for setup in setups:
        try:
            results.append(compare(setup))
        except Exception:  # the others may do better
            results.append({"failed": traceback.format_exc()})
    return results


def in_new_process(setups: list[dict]) -> list[dict[str, dict]]:
    """Run `compare_all` in one new process without network. Raises ChildFailed with its text."""
    return training.in_processes(__file__, compare_all.__name__, timeout=900, setups=setups)[0]


if __name__ == "__main__":
    training.answer(compare_all)
