"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`in_new_process` runs a list of them in a process of its own: Unsloth must be imported first and changes other
libraries for good. Run as a file it is that process.
"""

import gc
import os
import traceback
from dataclasses import asdict, dataclass

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


@dataclass(frozen=True)
class Setup:
    """A run of a model; the fields up to `rank` are those of training.adapted."""

    folder: str
    library: str = "peft"
    dtype: str = "bfloat16"
    autocast: str | None = None
    checkpointing: bool = False
    dora: bool = False
    rank: int = 8
    steps: int = 50
    compiled: bool = False
    rows: int = 4
    length: int = 64
    new_tokens: int = 16  # generated after training, 0: none


def train(setup: Setup, kernel: bool) -> dict:
    """Run a setup once, with the kernel or without.

    Returns what must not depend on the kernel as "same", and peak_bytes, Switch.counts(), and the launches of
    dequantizing kernels in one more step (on a GPU).
    """
    try:
        with training.arm(setup.library, training.ARMS[kernel]) as switch, training.deterministic():
            return _train(setup, switch)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _train(setup: Setup, switch) -> dict:
    from helpers.puzzle.protocol import gpu_events

    gpu, how = torch.cuda.is_available(), {"use_dora": True} if setup.dora else {}
    how |= dict(autocast=setup.autocast is not None, checkpointing=setup.checkpointing)
    model = training.adapted(setup.folder, setup.library, setup.dtype, setup.rank, **how)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    call, device = torch.compile(model) if setup.compiled else model, adapters[0].device
    amp = getattr(torch, setup.autocast or setup.dtype)
    # Counting up from random tokens: something to learn.
    generator = torch.Generator().manual_seed(3407)
    starts = torch.randint(3, 200, (setup.steps, setup.rows, 1), generator=generator)
    batches = ((starts + torch.arange(setup.length)) % model.config.vocab_size).to(device)

    def step(ids):
        with torch.autocast(device.type, amp, enabled=setup.autocast is not None):
            loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    same = {"losses": [], "gradients": []}
    for ids in batches:
        same["losses"].append(step(ids).item())
        same["gradients"].append(digest(p.grad for p in adapters))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    record = {"same": same, "launches": {}, "counts": switch.counts() if switch else {}}
    record["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else None
    same["adapters"] = digest(adapters)
    if gpu:
        names = [name for name, *_ in gpu_events(lambda: step(batches[0]), 1)]
        record["launches"] = {who: sum(one in name for name in names) for who, one in KERNELS.items()}
        optimizer.zero_grad(set_to_none=True)
    _use(setup, model, batches[0][:1, :7], same)
    return record


def _use(setup: Setup, model, prompt, same: dict) -> None:
    """Generate, merge and dequantize with what was trained."""
    if setup.new_tokens:
        if setup.library == "unsloth":
            from unsloth import FastLanguageModel

            FastLanguageModel.for_inference(model)
        model.train(prompt.device.type == "cpu")  # eval mode there may repack weights
        how = dict(max_new_tokens=setup.new_tokens, do_sample=False, use_cache=True)
        with torch.no_grad():
            ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)
        same["tokens"] = ids[0].tolist()
    if setup.library == "peft":
        merged = model.merge_and_unload()
        weights = [m.weight for m in merged.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
        states = [w.quant_state for w in weights]
        parts = [t for w, s in zip(weights, states, strict=True) for t in (w, s.absmax, s.state2.absmax)]
        same["merged"] = digest(parts)
        same["dequantized"] = digest(merged.dequantize().parameters())


def compare(setup: Setup) -> dict[str, dict]:
    """Run a setup with the kernel, without, and on a GPU once more without: does it repeat at all?"""
    records = {"with": train(setup, True), "without": train(setup, False)}
    if machine.has_gpu() and not setup.compiled:
        records["again"] = train(setup, False)
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
            results.append(compare(Setup(**setup)))
        except Exception:  # the others may do better
            results.append({"failed": traceback.format_exc()})
    return results


def in_new_process(setups: list[Setup]) -> list[dict[str, dict]]:
    """Run `compare_all` in one new process without network. Raises ChildFailed with its text."""
    options = dict(timeout=900, setups=[asdict(setup) for setup in setups])
    return training.in_processes(__file__, compare_all.__name__, **options)[0]


if __name__ == "__main__":
    training.answer(compare_all)
