"""QLoRA with the kernel and without: real libraries on small random models, in processes of their own.

The sections `training` and `several_gpus` of `python -m helpers bench`. Losses and gradients must be
bit-identical with and without the kernel, or nothing is timed. Unsloth changes the other libraries for good
and asks to be imported first, so each library gets a new process.
"""

import contextlib
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from helpers import machine
from helpers.bench import clocks
from helpers.nf4.reference import default_device
from helpers.results.store import Row

SIZES = dict(
    hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, vocab_size=320,  # what the tokenizer knows, and some
)  # fmt: skip
LLAMA3_8B = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=8192, vocab_size=32000, num_hidden_layers=4,  # of 32
)  # fmt: skip
WIDER = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
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
ROUNDS = 40
LONGEST = 5  # seconds for each case: the round that reaches them is the last
REPEATS = 3  # steps of each arm that are compared: a backward pass that varies may agree by chance


# --- processes ---


def in_processes(*command, processes: int = 0, timeout: float = 300, **options) -> list:
    """Run Python with `command`, whose `answer(functions)` calls a function with the options.

    processes: under torch.distributed.run, in so many; 0: in one without it. Returns what the function
    returned in each. Raises ChildFailed with their output.
    """
    if processes:
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, *command)
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes modules to its working directory
        command = [*command, json.dumps(options)]
        machine.python(command, folder=folder, variables=VARIABLES, timeout=timeout)
        files = [Path(folder, f"{rank}.json") for rank in range(processes or 1)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def answer(*functions) -> None:
    """In such a process: call the function that the command line names, and write what it returns."""
    machine.prepare()
    function = {function.__name__: function for function in functions}[sys.argv[1]]
    file = Path(f"{os.environ.get('RANK', 0)}.json").resolve()
    file.write_text(json.dumps(function(**json.loads(sys.argv[2]))), encoding="utf-8")


# --- models ---


def tokenizer():
    """Return a tokenizer that reads bytes (transformers' fast class), with pad, bos and eos tokens."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = ByteLevelBPETokenizer({token: index for index, token in enumerate(tokens)}, [])
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(raw.to_str()), **special)


def make_model(folder, family: str = "llama", **sizes) -> str:
    """Save a random bf16 model of a family (llama, qwen2, qwen3) with its tokenizer in `folder`; return it.

    sizes: fields of the transformers config, over SIZES. The same device and sizes give the same model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | sizes
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(family, **sizes, **special, tie_word_embeddings=False)
    torch.manual_seed(3407)
    with torch.device(default_device()):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def adapted(
    folder, library, dtype="bfloat16", rank=RANK, context=512, attention="eager", autocast=False,
    checkpointing=False, device=None, storage=torch.uint8, **more,
):  # fmt: skip
    """Return a model of `make_model` in doubly quantized NF4 with fresh LoRA adapters, in training mode.

    context: the longest sequence, for Unsloth. The rest is for PEFT. attention: "eager" repeats bit for bit
    on every card. autocast: adapters are fp32. storage: bnb_4bit_quant_storage. more: fields of LoraConfig.
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
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    how |= dict(bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=storage)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(**how),
        device_map={"": device or default_device()},
        attn_implementation=attention,
        local_files_only=True,
        use_cache=False,
    )
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
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def digest(tensors) -> str:
    """Return the SHA-256 over the bytes of tensors, 16 hex digits."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def handled(switch) -> int:
    """Return how many dequantizations went through the kernel while a switch was on; None: there is none."""
    return sum(site["kernel"] for site in switch.counts().values()) if switch else 0


def arm(library: str, name: str):
    """Return a context manager: "with" the kernel in `library` and bitsandbytes, or "without" it."""
    from helpers.integrate import use_nf4_kernel

    if name == "without":
        return contextlib.nullcontext()
    return use_nf4_kernel(library, "bitsandbytes", quiet=True, strict=True)


# --- one process ---


def steps(library: str, folder: str, sizes=STEPS) -> dict:
    """Compare and time training steps of one library, which is not imported yet.

    Returns {"ms": {case: {arm: milliseconds of each round}}, "problems": [...]}.
    """
    if library == "unsloth":
        import unsloth  # noqa: F401

    model = adapted(folder, library, context=2048, attention="sdpa")
    adapters = [p for p in model.parameters() if p.requires_grad]
    device = adapters[0].device
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, fused=True)
    # PEFT as trl sets QLoRA up: adapters in bf16. Unsloth keeps them in fp32 and trains under autocast.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=library == "unsloth")
    found = {"ms": {}, "problems": []}
    for rows, length, count in sizes:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(device)

        def backward(ids=ids):
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        def step(backward=backward):
            backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def gradients(backward=backward):
            with deterministic(strict=True):
                loss = backward()
            found = digest([loss.float(), *(p.grad for p in adapters)])
            optimizer.zero_grad(set_to_none=True)
            return found

        case = f"{LIBRARIES[library]}, {rows * length} tokens"
        try:
            if problem := unequal(library, gradients):
                found["problems"].append(f"{case}: {problem}")
            else:
                found["ms"][case] = times(library, step, count)
        except Exception as error:  # the other cases are no worse for it
            found["problems"].append(f"{case}: not timed: {type(error).__name__}: {error}")
    return found


def unequal(library: str, once) -> str:
    """Return why the digests that once() returns differ with and without the kernel, "" if they do not."""
    seen, kernel = {name: set() for name in ARMS}, 0
    for name in ARMS * REPEATS:
        with arm(library, name) as switch:
            seen[name].add(once())
            kernel += handled(switch)
    if not kernel:
        return "the kernel dequantized nothing: not timed"
    return "" if seen["with"] == seen["without"] else "results differ with the kernel: not timed"


def times(library: str, step, count: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each arm, one value a round of `count` steps.

    The arms take turns, and which comes first alternates. No round begins after LONGEST seconds.
    """
    found, began = {name: [] for name in ARMS}, time.perf_counter()
    for turn, name in enumerate(clocks.turns(ARMS, ROUNDS)):
        if turn and turn % 2 == 0 and time.perf_counter() - began > LONGEST:
            break
        with arm(library, name):
            step()  # untimed: what the other arm left in caches is not this one's
            clocks.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            clocks.synchronize()
            found[name].append(1e3 * (time.perf_counter() - start) / count)
    return found


# --- several processes: DDP, FSDP ---

ENGINES = {"DDP": 0, "FSDP1": 1, "FSDP2": 2}
TURNS = 12
TURN = 5  # steps between two switches
WARM_UP = 2  # turns that are not timed
SETTLE = 2  # steps of each turn that are not timed: a switch leaves the caches of Python and of the CPU cold


def ranks(folder: str, fsdp: int, turns=TURNS, turn=TURN, rows=4, length=128) -> dict:
    """Train in each process of a torch.distributed.run: without the kernel, then with it in every other turn.

    fsdp: 0 for DDP, or the version of FSDP. turn: steps of each. Returns for both runs the losses of all
    processes at each step, the seconds of the steps of each turn, and how often the kernel dequantized.
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
    size = (turns, turn, accelerator.num_processes, rows, length)
    with deterministic():
        records = {
            "without": _finetune(accelerator, folder, fsdp, size, ["without"]),
            "in turns": _finetune(accelerator, folder, fsdp, size, ARMS),
        }
    accelerator.end_training()
    return records


def _finetune(accelerator, folder, fsdp: int, size, arms) -> dict:
    from peft.utils.other import fsdp_auto_wrap_policy

    # FSDP shards floating point only: it keeps the packed bytes as bfloat16.
    storage = torch.bfloat16 if fsdp else torch.uint8
    model = adapted(folder, "peft", attention="sdpa", device=accelerator.device, storage=storage)
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
    batches = torch.randint(3, words, size, generator=torch.Generator().manual_seed(3407))
    record = {"losses": [], "seconds": [], "handled": 0}
    for batch_turn, name in zip(batches, itertools.cycle(arms)):
        seconds = []
        with arm("peft", name) as switch:
            for batch in batch_turn:
                ids = batch[accelerator.process_index].to(accelerator.device)
                start = time.perf_counter()
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                record["losses"].append(accelerator.gather(loss.detach().reshape(1)).tolist())
                seconds.append(time.perf_counter() - start)
        record["seconds"].append(seconds)
        record["handled"] += handled(switch)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    return record


def turns_ms(reports: list[dict]) -> dict[str, list[float]]:
    """Return {arm: milliseconds a step in each turn} from the records of all processes.

    A step takes as long as its slowest process, a turn as its median step.
    """
    turns = zip(*(one["in turns"]["seconds"] for one in reports), strict=True)
    ms = [1e3 * statistics.median([max(step) for step in zip(*turn, strict=True)][SETTLE:]) for turn in turns]
    return {name: ms[WARM_UP + at :: 2] for at, name in enumerate(ARMS)}


def several_problem(reports: list[dict]) -> str:
    """Return what is wrong with the records of all processes, "" if nothing is."""
    expected = reports[0]["without"]["losses"]
    if any(run["losses"] != expected for one in reports for run in one.values()):
        return "losses differ with the kernel: not timed"
    if not all(one["in turns"]["handled"] for one in reports):
        return "the kernel dequantized nothing in some process: not timed"
    return ""


# --- the sections ---


def training(scope, problems: list[str]) -> Iterator[Row]:
    """Yield training steps with and without the kernel: PEFT and Unsloth."""
    if not machine.has_gpu():
        print("training: not measured (needs a GPU)")
        return
    with tempfile.TemporaryDirectory() as folder:
        in_processes("-m", __name__, "make_model", folder=folder, **LLAMA3_8B)
        for library in LIBRARIES:
            try:
                [found] = in_processes("-m", __name__, "steps", library=library, folder=folder)
            except machine.ChildFailed as error:
                problems.append(f"{library}: {error}")
                continue
            problems += found["problems"]
            yield from rows_of("training", found["ms"])


def several_gpus(scope, problems: list[str]) -> Iterator[Row]:
    """Yield steps under DDP and FSDP on every GPU here, with and without the kernel."""
    processes = torch.cuda.device_count() if machine.has_gpu() else 0
    if processes < 2:
        print(f"several_gpus: not measured (needs two GPUs, this machine has {processes})")
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, **WIDER)
        for engine, fsdp in ENGINES.items():
            try:
                reports = in_processes("-m", __name__, "ranks", processes=processes, folder=folder, fsdp=fsdp)
            except machine.ChildFailed as error:
                problems.append(f"{engine}: {error}")
                continue
            if problem := several_problem(reports):
                problems.append(f"{engine}: {problem}")
            else:
                yield from rows_of("several_gpus", {engine: turns_ms(reports)})


def rows_of(section: str, ms: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Return a row for each case and arm."""
    return [
        Row(section, case, name, "ms", values) for case, arms in ms.items() for name, values in arms.items()
    ]


if __name__ == "__main__":
    answer(make_model, steps, ranks)
