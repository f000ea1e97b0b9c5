"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`in_new_process` runs a list of them in a process of its own: Unsloth must be imported first and changes other
libraries for good. Run as a file it is that process.
"""

import gc
import json
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from helpers import machine
from helpers.bench import training
from helpers.bench.training import digest

TEXT = Path(__file__).read_text(encoding="utf-8")  # what the models learn
# Unsloth cuts its loss into as many chunks as the memory that is free allows: one, so that runs compare.
ONE_LOSS = {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}
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
    merge: bool = True


@dataclass
class Record:
    """What a run produced. The fields up to `dequantized` must not depend on the kernel."""

    losses: list[float] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)  # digest of all LoRA gradients of each step
    adapters: str = ""  # digest of the LoRA weights after the last step
    tokens: list[int] = field(default_factory=list)
    merged: str = ""  # digest of the packed weights and states after merge_and_unload
    dequantized: str = ""  # digest of the weights after model.dequantize()
    peak_bytes: int | None = None
    counts: dict = field(default_factory=dict)  # Switch.counts()
    launches: dict = field(default_factory=dict)  # of dequantizing kernels in one more step, on a GPU
    error: str = ""  # why there is no run


def differences(a: Record, b: Record) -> list[str]:
    """Names of what differs between two runs, with the first step at which it does."""
    names = []
    for name in ("losses", "gradients", "adapters", "tokens", "merged", "dequantized"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            steps = [i for i, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]]
            names.append(f"{name} from step {steps[0]}" if isinstance(x, list) and steps else name)
    return names


def train(setup: Setup, kernel: bool) -> Record:
    """Run a setup once, with the kernel or without."""
    import torch

    try:
        with training.arm(setup.library, training.ARMS[kernel]) as switch, training.deterministic():
            return _train(setup, switch)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def windows(setup: Setup) -> list:
    """For each step a tensor (rows, length) of token ids: random windows of a text."""
    import torch
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(setup.folder, local_files_only=True)
    ids = torch.tensor(words(TEXT)["input_ids"])
    generator = torch.Generator().manual_seed(3407)
    starts = torch.randint(0, len(ids) - setup.length, (setup.steps, setup.rows), generator=generator)
    return [torch.stack([ids[start : start + setup.length] for start in row]) for row in starts.tolist()]


def _train(setup: Setup, switch) -> Record:
    import torch

    from helpers.puzzle.protocol import gpu_events

    record, gpu = Record(), torch.cuda.is_available()
    how = dict(autocast=setup.autocast is not None, checkpointing=setup.checkpointing)
    how |= {"use_dora": True} if setup.dora else {}
    model = training.adapted(setup.folder, setup.library, setup.dtype, setup.rank, **how)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    call, device = torch.compile(model) if setup.compiled else model, adapters[0].device
    batches, amp = windows(setup), getattr(torch, setup.autocast or setup.dtype)

    def step(ids):
        ids = ids.to(device)
        with torch.autocast(device.type, amp, enabled=setup.autocast is not None):
            loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for ids in batches:
        record.losses.append(step(ids).item())
        record.gradients.append(digest(p.grad for p in adapters))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    record.peak_bytes = torch.cuda.max_memory_allocated() if gpu else None
    record.counts = switch.counts() if switch else {}
    record.adapters = digest(adapters)
    if gpu:
        names = [name for name, *_ in gpu_events(lambda: step(batches[0]), 1)]
        record.launches = {library: sum(one in name for name in names) for library, one in KERNELS.items()}
        optimizer.zero_grad(set_to_none=True)
    _use(setup, model, batches[0][:1, :7].to(device), record)
    return record


def _use(setup: Setup, model, prompt, record: Record) -> None:
    """Generate, merge and dequantize with what was trained."""
    import torch

    if setup.new_tokens:
        if setup.library == "unsloth":
            from unsloth import FastLanguageModel

            FastLanguageModel.for_inference(model)
        model.train(prompt.device.type == "cpu")  # eval mode there may repack weights
        how = dict(max_new_tokens=setup.new_tokens, do_sample=False, use_cache=True)
        with torch.no_grad():
            ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)
        record.tokens = ids[0].tolist()
    if setup.merge and setup.library == "peft":
        merged = model.merge_and_unload()
        weights = [m.weight for m in merged.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
        states = [w.quant_state for w in weights]
        parts = [t for w, s in zip(weights, states, strict=True) for t in (w, s.absmax, s.state2.absmax)]
        record.merged = digest(parts)
        record.dequantized = digest(merged.dequantize().parameters())


def compare(setup: Setup) -> dict[str, Record]:
    """The same run with the kernel, without, and on a GPU once more without: does it repeat at all?"""
    records = {"with": train(setup, True), "without": train(setup, False)}
    if machine.has_gpu() and not setup.compiled:
        records["again"] = train(setup, False)
    return records


def in_new_process(setups: list[Setup]) -> list[dict[str, Record]]:
    """`compare` for each setup, all in one new process without network. Raises ChildFailed with its text."""
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes generated modules where it runs
        Path(folder, "setups.json").write_text(json.dumps([asdict(one) for one in setups]), encoding="utf-8")
        machine.python([__file__], folder=folder, variables=training.VARIABLES | ONE_LOSS, timeout=900)
        rows = json.loads(Path(folder, "records.json").read_text(encoding="utf-8"))
    return [{name: Record(**record) for name, record in records.items()} for records in rows]


def main() -> None:
    machine.prepare()
    setups = [Setup(**one) for one in json.loads(Path("setups.json").read_text(encoding="utf-8"))]
    if any(setup.library == "unsloth" for setup in setups):
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    rows = []
    for setup in setups:
        try:
            records = compare(setup)
        except Exception:  # the others may do better
            records = {"failed": Record(error=traceback.format_exc())}
        rows.append({name: asdict(record) for name, record in records.items()})
    Path("records.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
