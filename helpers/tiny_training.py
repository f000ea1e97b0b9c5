"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`python -m helpers.tiny_training SETUPS.json OUT.json` runs a list of setups in a process of its own: Unsloth
must be imported first and changes other libraries for good.
"""

import contextlib
import gc
import hashlib
import json
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEQUANTIZERS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}


@dataclass(frozen=True)
class Setup:
    """One QLoRA run. `folder`: a model of helpers.tiny_models; `library`: peft or unsloth."""

    folder: str
    library: str = "peft"
    steps: int = 50
    dtype: str = "bfloat16"
    autocast: str | None = None
    checkpointing: bool = False
    compiled: bool = False
    dora: bool = False
    rows: int = 4
    length: int = 64
    rank: int = 8
    new_tokens: int = 16  # generated after training, 0: none
    merge: bool = True


@dataclass
class Record:
    """What a run produced. Everything but the last four fields must not depend on the kernel."""

    losses: list[str] = field(default_factory=list)  # fp32 bits of each step's loss, in hex
    gradients: list[str] = field(default_factory=list)  # digest of all LoRA gradients of each step
    adapters: str = ""  # digest of the LoRA weights after the last step
    tokens: list[int] = field(default_factory=list)
    merged: str = ""  # digest of the packed weights and states after merge_and_unload
    dequantized: str = ""  # digest of the weights after model.dequantize()
    peak_bytes: int | None = None
    step_seconds: list[float] = field(default_factory=list)
    counts: dict = field(default_factory=dict)  # Switch.counts()
    launches: dict = field(default_factory=dict)  # of dequantizing kernels in one more step, by the profiler

    def losses_as_floats(self) -> list[float]:
        return [struct.unpack(">f", bytes.fromhex(bits))[0] for bits in self.losses]


SAME = ("losses", "gradients", "adapters", "tokens", "merged", "dequantized")


def differences(a: Record, b: Record) -> list[str]:
    """Names of what differs between two runs, with the first step at which it does."""
    found = []
    for name in SAME:
        x, y = getattr(a, name), getattr(b, name)
        if x != y:
            steps = [i for i, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]]
            found.append(f"{name} from step {steps[0]}" if isinstance(x, list) and steps else name)
    return found


def digest(tensors) -> str:
    """SHA-256 over the bytes of tensors, 16 hex digits."""
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def adapted(setup: Setup):
    """The model of a setup, loaded in 4 bit from disk, with fresh LoRA adapters; in training mode."""
    import torch

    from helpers import tiny_models

    dtype = getattr(torch, setup.dtype)
    torch.manual_seed(3407)
    if setup.library == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            model_name=setup.folder,
            max_seq_length=512,
            dtype=dtype,
            load_in_4bit=True,
            use_exact_model_name=True,
            fix_tokenizer=False,
            local_files_only=True,
            use_gradient_checkpointing=setup.checkpointing,
        )
        return FastLanguageModel.get_peft_model(
            model,
            r=setup.rank,
            lora_alpha=2 * setup.rank,
            lora_dropout=0,
            bias="none",
            target_modules=MODULES,
            use_gradient_checkpointing=setup.checkpointing,
            random_state=3407,
        )
    from peft import LoraConfig, get_peft_model

    model = tiny_models.load(setup.folder, dtype, attention="eager")
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    config = LoraConfig(
        r=setup.rank,
        lora_alpha=2 * setup.rank,
        lora_dropout=0.0,
        target_modules=MODULES,
        task_type="CAUSAL_LM",
        use_dora=setup.dora,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=setup.autocast is not None).train()


def train(setup: Setup, kernel: bool) -> Record:
    """Run a setup once, with the kernel or without."""
    import torch

    from helpers import tiny_models
    from helpers.integrate import use_nf4_kernel

    gpu = torch.cuda.is_available()
    if setup.library == "unsloth":
        import unsloth  # noqa: F401  before the switch, which takes what is imported

    torch.use_deterministic_algorithms(True, warn_only=True)
    record = Record()
    switch = use_nf4_kernel(setup.library, "bitsandbytes", quiet=True) if kernel else None
    with switch or contextlib.nullcontext():
        model = adapted(setup)
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-3)
        call = torch.compile(model) if setup.compiled else model
        device = adapters[0].device
        batches = tiny_models.batches(setup.folder, setup.steps, setup.rows, setup.length)
        amp = getattr(torch, setup.autocast or setup.dtype)

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
            start = time.perf_counter()
            loss = step(ids)
            record.losses.append(struct.pack(">f", loss.item()).hex())
            record.gradients.append(digest(p.grad for p in adapters))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record.step_seconds.append(time.perf_counter() - start)
        if gpu:
            record.peak_bytes = torch.cuda.max_memory_allocated()
        if switch:
            record.counts = switch.counts()
        record.adapters = digest(adapters)
        if gpu:
            record.launches = launches(lambda: step(batches[0]))
            optimizer.zero_grad(set_to_none=True)
        _use(setup, model, batches[0][:1, :7].to(device), record)
    del model, adapters, optimizer, call, step
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(False)
    return record


def _use(setup: Setup, model, prompt, record: Record) -> None:
    """Generate, merge and dequantize with what was trained."""
    import torch

    on_cpu = prompt.device.type == "cpu"  # eval mode there may repack weights for bitsandbytes' CPU product
    if setup.new_tokens:
        if setup.library == "unsloth":
            from unsloth import FastLanguageModel

            FastLanguageModel.for_inference(model)
        model.train(on_cpu)
        with torch.no_grad():
            ids = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=setup.new_tokens,
                do_sample=False,
                use_cache=True,
            )
        record.tokens = ids[0].tolist()
    if setup.merge and setup.library == "peft":
        merged = model.merge_and_unload()
        weights = [m.weight for m in merged.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
        states = [w.quant_state for w in weights]
        record.merged = digest(
            t for w, s in zip(weights, states, strict=True) for t in (w, s.absmax, s.state2.absmax)
        )
        record.dequantized = digest(merged.dequantize().parameters())


def launches(step) -> dict[str, int]:
    """How many dequantizing kernels one call of `step` launches, by who launches them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = [row for row in seen.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
    return {who: sum(row.count for row in rows if name in row.key) for who, name in DEQUANTIZERS.items()}


def compare(setup: Setup) -> dict[str, Record]:
    """The same run with the kernel, without, and without once more (which shows that it repeats at all)."""
    runs = {"with": train(setup, True), "without": train(setup, False)}
    if not setup.compiled:
        runs["again"] = train(setup, False)
    return runs


def main(argv: list[str]) -> int:
    setups = [Setup(**one) for one in json.loads(Path(argv[0]).read_text(encoding="utf-8"))]
    if any(setup.library == "unsloth" for setup in setups):
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    found = []
    for setup in setups:
        try:
            runs = {name: asdict(record) for name, record in compare(setup).items()}
        except Exception as error:
            import traceback

            traceback.print_exc()
            runs = {"error": f"{type(error).__name__}: {error}"}
        found.append({"setup": asdict(setup), "runs": runs})
        Path(argv[1]).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
