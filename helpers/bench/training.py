"""QLoRA with the kernel and without: real libraries on small random models, in processes of their own.

The sections `training` and `several_gpus` of `python -m helpers bench`. Losses and gradients must be
bit-identical with and without the kernel, or nothing is timed. Unsloth changes the other libraries for good
and asks to be imported first, so each library gets a new process.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from helpers import machine
from helpers.results.store import Row

SIZES = dict(
    hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, vocab_size=320,  # what the tokenizer knows, and some
)  # fmt: skip
LLAMA3_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=8192, vocab_size=32000, num_hidden_layers=4,  # of 32
)  # fmt: skip
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# For processes that train: nothing is looked up, and cuBLAS repeats its results.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
LIBRARIES = {"peft": "PEFT", "unsloth": "Unsloth"}
ARMS = ("without", "with")
RANK = 16
STEPS = ((1, 512, 4), (1, 2048, 2), (4, 2048, 1))  # sequences, tokens each, steps timed at once
PROMPT = 2048  # tokens of the prefill
ROUNDS = 40
LONGEST = 5  # seconds for each case: the round that reaches them is the last
REPEATS = 3  # steps of each arm that are compared: a backward pass that varies may agree by chance


# --- models ---


def tokenizer():
    """Return a tokenizer that reads bytes (transformers' fast class), with pad, bos and eos tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def make_model(folder, family: str = "llama", device: str = "cpu", **sizes) -> Path:
    """Save a random bf16 model of a family (llama, qwen2, qwen3) with its tokenizer in `folder`; return it.

    sizes: fields of the transformers config, over SIZES. The same device and sizes give the same model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | sizes
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(family, **sizes, **special, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[] if device == "cpu" else None), torch.device(device):
        torch.manual_seed(3407)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Path(folder)


def quantized(folder, dtype, device, attention="eager", storage=torch.uint8):
    """Return a saved model, loaded in doubly quantized NF4 by transformers."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    how |= dict(bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=storage)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(**how),
        device_map={"": device},
        attn_implementation=attention,
        local_files_only=True,
    )
    model.config.use_cache = False
    return model


def adapted(
    folder, library, dtype, rank, context=512, attention="eager", autocast=False, checkpointing=False, **more
):
    """Return a model of `make_model`, loaded in 4 bit, with fresh LoRA adapters, in training mode.

    dtype: "float16" or "bfloat16". context: the longest sequence, for Unsloth. attention: for PEFT; "eager"
    repeats bit for bit on every card. autocast: PEFT's adapters are fp32. more: fields of PEFT's LoraConfig.
    """
    dtype = getattr(torch, dtype)
    lora = dict(r=rank, lora_alpha=2 * rank, target_modules=MODULES, **more)
    torch.manual_seed(3407)
    if library == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            model_name=str(folder),
            max_seq_length=context,
            dtype=dtype,
            load_in_4bit=True,
            use_exact_model_name=True,
            fix_tokenizer=False,
            use_gradient_checkpointing=checkpointing,
        )
        return FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing=checkpointing)
    from peft import LoraConfig, get_peft_model

    model = quantized(folder, dtype, "cuda" if machine.has_gpu() else "cpu", attention)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    config = LoraConfig(**lora, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=autocast).train()


@contextlib.contextmanager
def deterministic(strict: bool = False):
    """Use deterministic algorithms inside the block, so that runs can be compared bit for bit.

    Fused attention's backward is deterministic only if `strict`. Then an operation that has no deterministic
    implementation raises RuntimeError; otherwise it runs, with a warning.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks when it starts
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def digest(tensors) -> str:
    """Return the SHA-256 over the bytes of tensors, 16 hex digits."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def handled(switch) -> int:
    """Return how many dequantizations went through the kernel while a switch was on."""
    return sum(site["kernel"] for site in switch.counts().values())


def arm(library: str, name: str):
    """Return a context manager: "with" the kernel in `library` and bitsandbytes, or "without" it."""
    from helpers.integrate import use_nf4_kernel

    return (
        use_nf4_kernel(library, "bitsandbytes", quiet=True, strict=True)
        if name == "with"
        else contextlib.nullcontext()
    )


# --- one process: steps, prefill, dequantizing and merging a model ---


def steps(
    library: str, folder: str, out: str | None = None, sizes=STEPS, prompt=PROMPT, rounds=ROUNDS
) -> dict:
    """Compare and time one library in this process; write the result to the file `out` as JSON.

    Returns {"ms": {case: {arm: milliseconds of each round}}, "problems": [...]}.
    """
    if library == "unsloth":
        import unsloth  # noqa: F401

    model = adapted(folder, library, "bfloat16", RANK, max(2048, prompt), attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=library == "unsloth")
    found = {"ms": {}, "problems": []}

    def tokens(rows, length):
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

    def backward(ids):
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    def step(ids):
        backward(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def gradients(ids):
        with deterministic(strict=True):
            loss = backward(ids)
        found = digest([loss.float(), *(p.grad for p in adapters)])
        optimizer.zero_grad(set_to_none=True)
        return found

    def measure(case, once, prepare, count=1, repeats=1):
        case, switch = f"{LIBRARIES[library]}, {case}", functools.partial(arm, library)
        try:
            if problem := unequal(switch, once, repeats):
                raise AssertionError(problem)
            found["ms"][case] = times(switch, prepare, rounds, count)
        except Exception as error:  # the other cases are no worse for it
            found["problems"].append(f"{case}: not timed: {type(error).__name__}: {error}")

    for rows, length, count in sizes:
        ids = tokens(rows, length)

        def warm(ids=ids):
            step(ids)  # untimed: what the other arm left in caches is not this one's
            return functools.partial(step, ids)

        measure(f"{rows * length} tokens", functools.partial(gradients, ids), warm, count, REPEATS)

    model.train(device.type == "cpu")  # eval mode there may repack weights for bitsandbytes' CPU product

    def prefill():
        with torch.no_grad(), autocast:
            return [model(input_ids=tokens(1, prompt)).logits]

    measure(f"prefill ({prompt} tokens)", lambda: digest(prefill()), lambda: prefill)
    if library == "peft":
        for case, finish in (
            ("dequantize the model", lambda whole: whole.unload().dequantize()),
            ("merge the adapter", lambda whole: whole.merge_and_unload()),
        ):

            def prepare(finish=finish):
                whole = copy.deepcopy(model)
                return lambda: finish(whole)

            measure(case, lambda prepare=prepare: digest(prepare()().parameters()), prepare)
    if out:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    return found


def unequal(switch, once, repeats: int) -> str:
    """Return why the results differ with and without the kernel, "" if they do not.

    switch(arm): a context manager. once() -> digest of all that must be equal.
    """
    seen = {name: set() for name in ARMS}
    kernel = 0
    for name in ARMS * repeats:
        with switch(name) as one:
            seen[name].add(once())
            kernel += handled(one) if one else 0
    if not kernel:
        return "the kernel dequantized nothing"
    return "" if seen["with"] == seen["without"] else "results differ with the kernel"


def times(switch, prepare, rounds: int, count: int = 1) -> dict[str, list[float]]:
    """Return the milliseconds of what `prepare()` returns in each arm, one value a round.

    The arms take turns, and which comes first alternates. A round times `count` runs; the first round is not
    kept, and none begins after LONGEST seconds.
    """
    from helpers.bench.clocks import synchronize

    found, began = {name: [] for name in ARMS}, time.perf_counter()
    for turn in range(-1, rounds):
        for name in ARMS if turn % 2 else ARMS[::-1]:
            with switch(name):
                run = prepare()
                synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    run()
                synchronize()
                if turn >= 0:
                    found[name].append(1e3 * (time.perf_counter() - start) / count)
                del run
        if turn >= 0 and time.perf_counter() - began > LONGEST:
            break
    return found


# --- several processes: DDP, FSDP ---

ENGINES = {"DDP": 0, "FSDP1": 1, "FSDP2": 2}
WIDER = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
TURN = 5  # steps between two switches
WARM_UP = 2  # turns that are not timed
SETTLE = 2  # steps of each turn that are not timed: a switch leaves the caches of Python and of the CPU cold


def ranks(
    folder: str, fsdp: int, count: int, out: str, rows: int = 4, length: int = 128, turn: int = TURN
) -> None:
    """Train in every process of a torch.distributed.run: without the kernel, then in turns of `turn` steps.

    fsdp: 0 for DDP, or the version of FSDP. count: steps. Each process writes its records to `out`.RANK: of
    each step the losses of all processes, its seconds, and whether it was with the kernel.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp,
            use_orig_params=False if fsdp == 1 else None,
            cpu_ram_efficient_loading=False,
            sync_module_states=False if fsdp == 1 else None,
        )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not machine.has_gpu())
    turns = {"without": [False], "in turns": [False] * turn + [True] * turn}
    with deterministic():
        records = {
            name: _finetune(
                accelerator, folder, fsdp, [kernel[i % len(kernel)] for i in range(count)], rows, length
            )
            for name, kernel in turns.items()
        }
    Path(f"{out}.{accelerator.process_index}").write_text(json.dumps(records), encoding="utf-8")
    accelerator.end_training()


def _finetune(accelerator, folder, fsdp: int, kernel: list[bool], rows: int, length: int) -> dict:
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    torch.manual_seed(3407)
    # FSDP shards floating point only: it keeps the packed bytes as bfloat16.
    storage = torch.bfloat16 if fsdp else torch.uint8
    model = quantized(folder, torch.bfloat16, accelerator.device, "sdpa", storage)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    words = model.config.vocab_size
    if fsdp:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    if fsdp == 1:  # the optimizer must see the sharded parameters
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    if fsdp == 1:
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    size = (len(kernel), accelerator.num_processes, rows, length)
    batches = torch.randint(3, words, size, generator=torch.Generator().manual_seed(3407))
    record = {"losses": [], "seconds": [], "kernel": kernel, "handled": 0, "device": str(accelerator.device)}
    for on, turn in itertools.groupby(zip(kernel, batches, strict=True), lambda pair: pair[0]):
        with arm("peft", ARMS[on]) as switch:
            for _, batch in turn:
                ids = batch[accelerator.process_index].to(accelerator.device)
                start = time.perf_counter()
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                record["losses"].append(accelerator.gather(loss.detach().reshape(1)).tolist())
                record["seconds"].append(time.perf_counter() - start)
        record["handled"] += handled(switch) if switch else 0
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    return record


def launch(processes: int, timeout: float = 300, **options) -> list[dict]:
    """Run `ranks` in so many processes and return their records. Raises ChildFailed with their output."""
    with tempfile.TemporaryDirectory() as folder:
        options["out"] = str(Path(folder, "records"))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
        command += ["-m", __name__, "ranks", json.dumps(options)]
        machine.python(command, variables=VARIABLES, timeout=timeout)
        files = [Path(folder, f"records.{rank}") for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def turns_ms(reports: list[dict]) -> dict[str, list[float]]:
    """Return {arm: milliseconds a step in each turn} from the records of all processes.

    A step takes as long as its slowest process, a turn as its median step.
    """
    seconds = [max(each) for each in zip(*(one["in turns"]["seconds"] for one in reports), strict=True)]
    timed = zip(reports[0]["in turns"]["kernel"], seconds, strict=True)
    turns = [
        (kernel, 1e3 * statistics.median([second for _, second in list(turn)[SETTLE:]]))
        for kernel, turn in itertools.groupby(timed, lambda step: step[0])
    ][WARM_UP:]
    return {name: [ms for kernel, ms in turns if kernel == (name == "with")] for name in ARMS}


def several_problem(reports: list[dict]) -> str:
    """Return what is wrong with the records of all processes, "" if nothing is."""
    expected = reports[0]["without"]["losses"]
    if any(run["losses"] != expected for one in reports for run in one.values()):
        return "losses differ with the kernel: not timed"
    if not all(one["in turns"]["handled"] for one in reports):
        return "the kernel dequantized nothing in some process"
    return ""


# --- the sections ---


def training(scope, problems: list[str]) -> list[Row]:
    """Training steps, prefill, dequantizing and merging, with and without the kernel: PEFT and Unsloth."""
    if problem := machine.no_gpu() or machine.old_gpu():
        print(f"training: not measured ({problem})")
        return []
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # also Unsloth's working directory: it writes modules there

        def run(function, **options):
            command = ["-m", __name__, function, json.dumps(options)]
            machine.python(command, folder=folder, variables=VARIABLES, timeout=300)

        run("make_model", folder=folder, device="cuda", **LLAMA3_8B)
        for library in LIBRARIES:
            out = Path(folder, f"{library}.json")
            try:
                run("steps", library=library, folder=folder, out=str(out))
                found = json.loads(out.read_text("utf-8"))
            except machine.ChildFailed as error:
                found = {"ms": {}, "problems": [f"{library}: {error}"]}
            problems += found["problems"]
            steps_ms = {case: ms for case, ms in found["ms"].items() if case.endswith(" tokens")}
            rows += rows_of("training", steps_ms)
            rows += rows_of(
                "whole_model", {case: ms for case, ms in found["ms"].items() if case not in steps_ms}
            )
    return rows


def several_gpus(scope, problems: list[str]) -> list[Row]:
    """DDP and FSDP on every GPU here, with and without the kernel."""
    processes = torch.cuda.device_count() if machine.has_gpu() else 0
    if processes < 2:
        print(f"several_gpus: not measured (needs two GPUs, this machine has {processes})")
        return []
    ms = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, **WIDER)
        for engine, fsdp in ENGINES.items():
            try:
                reports = launch(processes, folder=folder, fsdp=fsdp, count=12 * TURN)
            except machine.ChildFailed as error:
                problems.append(f"{engine}: {error}")
                continue
            if problem := several_problem(reports):
                problems.append(f"{engine}: {problem}")
            else:
                ms[engine] = turns_ms(reports)
    return rows_of("several_gpus", ms)


def rows_of(section: str, ms: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Return a row for each case and arm."""
    return [
        Row(section, case, name, "ms", values) for case, arms in ms.items() for name, values in arms.items()
    ]


if __name__ == "__main__":
    machine.prepare()
    options = json.loads(sys.argv[2])
    {"make_model": make_model, "steps": steps, "ranks": ranks}[sys.argv[1]](**options)
