"""Short QLoRA runs with the kernel and without, to be compared bit for bit.

`python -m helpers.training.tiny_training SETUPS.json OUT.json` runs a list of setups in a process of its own: Unsloth
must be imported first and changes other libraries for good.
"""

import contextlib
import gc
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEQUANTIZERS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
# Unsloth cuts its loss into as many chunks as the memory that is free allows: one, so that runs compare.
ONE_LOSS = {"UNSLOTH_CE_LOSS_N_CHUNKS": "1", "UNSLOTH_FUSED_CE_COMPILE_DISABLE": "1"}


@dataclass(frozen=True)
class Setup:
    """One QLoRA run. `folder`: a model of helpers.training.tiny_models; `library`: peft or unsloth."""

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
    context: int = 512  # the longest sequence, for Unsloth
    new_tokens: int = 16  # generated after training, 0: none
    merge: bool = True
    profiled: bool = True  # on a GPU, count the launches of one more step


@dataclass
class Record:
    """What a run produced. The fields up to `dequantized` must not depend on the kernel."""

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
    error: str = ""  # why there is no run

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


def adapted(setup: Setup, attention: str = "eager"):
    """The model of a setup, loaded in 4 bit from disk, with fresh LoRA adapters; in training mode.

    `attention` is for PEFT: "eager" repeats bit for bit on every card. Unsloth has its own."""
    import torch

    from helpers.training import tiny_models

    dtype = getattr(torch, setup.dtype)
    torch.manual_seed(3407)
    if setup.library == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            model_name=setup.folder,
            max_seq_length=setup.context,
            dtype=dtype,
            load_in_4bit=True,
            use_exact_model_name=True,
            fix_tokenizer=False,
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

    model = tiny_models.load(setup.folder, dtype, attention=attention)
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

    from helpers.nf4.integrate import use_nf4_kernel

    gpu = torch.cuda.is_available()
    switch = use_nf4_kernel(setup.library, "bitsandbytes", quiet=True) if kernel else None
    try:
        with switch or contextlib.nullcontext(), deterministic():
            return _train(setup, switch, gpu)
    finally:
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def deterministic(strict: bool = False):
    """Deterministic algorithms, so that runs can be compared bit for bit.

    Fused attention's backward is deterministic only if `strict`. Then an operation that has no deterministic
    implementation raises RuntimeError; otherwise it runs, with a warning.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch warns that cuBLAS may vary
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _train(setup: Setup, switch, gpu: bool) -> Record:
    import torch

    from helpers.training import tiny_models

    record, model = Record(), adapted(setup)
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
        loss = step(ids).item()  # waits for the GPU
        forward_and_backward = time.perf_counter() - start
        record.losses.append(struct.pack(">f", loss).hex())
        record.gradients.append(digest(p.grad for p in adapters))
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if gpu:
            torch.cuda.synchronize()
        record.step_seconds.append(forward_and_backward + time.perf_counter() - start)
    if gpu:
        record.peak_bytes = torch.cuda.max_memory_allocated()
    if switch:
        record.counts = switch.counts()
    record.adapters = digest(adapters)
    if gpu and setup.profiled:
        record.launches = launches(lambda: step(batches[0]))
        optimizer.zero_grad(set_to_none=True)
    _use(setup, model, batches[0][:1, :7].to(device), record)
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
    rows = gpu_rows(step)
    return {who: sum(row.count for row in rows if name in row.key) for who, name in DEQUANTIZERS.items()}


def gpu_rows(step, steps: int = 1) -> list:
    """What `steps` calls of `step` ran on the GPU: the profiler's rows of kernels and copies, no ranges."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return [
        row
        for row in seen.key_averages()
        if row.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(row, "is_user_annotation", False)
        and not row.key.startswith("Optimizer.")
    ]


def compare(setup: Setup) -> dict[str, Record]:
    """The same run with the kernel, without, and without once more (which shows that it repeats at all)."""
    runs = {"with": train(setup, True), "without": train(setup, False)}
    if not setup.compiled:
        runs["again"] = train(setup, False)
    return runs


def demo() -> dict[str, Record]:
    """A short QLoRA run with PEFT in this process, "with" the kernel and "without".

    {"failed": a Record with the error} where it does not run. On a GPU a random Llama of four layers, 50M
    parameters; in Triton's interpreter the smallest form.
    """
    from helpers.machine import environment
    from helpers.training import tiny_models

    sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    run = dict(steps=20, rows=4, length=128)
    if not environment.has_gpu():
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
        run = dict(steps=2, rows=1, length=16)
    elif not environment.native_bf16():
        run["dtype"] = "float16"
    try:
        with tempfile.TemporaryDirectory() as folder:
            tiny_models.make(folder, **sizes)
            setup = Setup(folder, new_tokens=0, merge=False, profiled=False, **run)
            setup = replace(setup, autocast=setup.dtype)
            return {"with": train(setup, True), "without": train(setup, False)}
    except Exception:  # it is no reason for a notebook to stop
        return {"failed": Record(error=traceback.format_exc())}


def summary(runs: dict[str, Record]) -> str:
    """Who dequantized in `demo`'s runs, and what differs between them."""
    if "failed" in runs:
        return runs["failed"].error
    sites = runs["with"].counts.values()
    kernel, library = (sum(site[who] for site in sites) for who in ("kernel", "library"))
    steps, found = len(runs["with"].losses), differences(runs["with"], runs["without"])
    return (
        f"{steps} QLoRA steps: {kernel} dequantizations by the kernel, {library} left to the library\n"
        f"differs from the run without it: {', '.join(found) or 'nothing'} (losses, gradients, adapters)"
    )


def in_new_process(setups: list[Setup], timeout: float = 900) -> list[dict[str, Record]]:
    """`compare` for each setup, all in one new process without network. Raises RuntimeError with its text."""
    from helpers.machine import environment

    path = os.pathsep.join(filter(None, (str(environment.ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "helpers.training.tiny_training", "setups.json", "found.json"]
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes generated modules where it runs
        Path(folder, "setups.json").write_text(json.dumps([asdict(one) for one in setups]), encoding="utf-8")
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | OFFLINE | ONE_LOSS | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        found = Path(folder, "found.json")
        if done.returncode or not found.exists():
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        found = json.loads(found.read_text(encoding="utf-8"))
    return [{name: Record(**run) for name, run in runs.items()} for runs in found]


def main(argv: list[str]) -> int:
    setups = [Setup(**one) for one in json.loads(Path(argv[0]).read_text(encoding="utf-8"))]
    if any(setup.library == "unsloth" for setup in setups):
        import unsloth  # noqa: F401  it asks to come before transformers and peft
    found = []
    for setup in setups:
        try:
            runs = compare(setup)
        except Exception:  # the others may do better
            runs = {"failed": Record(error=traceback.format_exc())}
        found.append({name: asdict(record) for name, record in runs.items()})
    Path(argv[1]).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
