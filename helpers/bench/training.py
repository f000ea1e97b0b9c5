"""QLoRA steps with the kernel and without: real libraries on random models, in processes of their own.

Sections of `python -m helpers bench`, named in RUNS. Losses and gradients must be bit-identical with and
without the kernel, or nothing is timed. Rounds of both are paired: the speedup is the median of their ratios
with its 95% bootstrap interval. Unsloth changes the other libraries for good and asks to be imported first,
so each section gets a new process. PEFT trains two models, nested and flat, whose steps take turns.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import torch

from helpers import machine
from helpers.bench import clocks
from helpers.puzzle.layers import DEVICE

LONGEST = 2048  # tokens of a sequence
LLAMA3_8B = dict(
    model_type="llama",
    num_hidden_layers=4,  # of 32
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
)
WHOLE_LLAMA3_8B = LLAMA3_8B | dict(num_hidden_layers=32, vocab_size=128256)
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe",
    num_hidden_layers=2,  # of 48
    hidden_size=2048,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=32000,
)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = dict(r=16, lora_alpha=32, target_modules=MODULES)
NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
FLAT = NF4 | dict(bnb_4bit_use_double_quant=False)  # BitsAndBytesConfig's default
# For processes that train: nothing is looked up, and cuBLAS repeats its results.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
VARIANTS = ("without", "with")
MOST_ROUNDS = 100
COUNT = 2  # steps a round: in a short one the host changes little
TOKENS = ((1, 128), (1, 512), (1, LONGEST), (4, LONGEST))  # sequences, tokens of each
MOE_TOKENS = ((1, 16), (1, 128), (1, 1024))
CORES = 2  # the backward pass has a thread of its own
RUNS = {  # section: library, sizes of a model, tokens, seconds for each model and its tokens, cores
    "training": ("peft", LLAMA3_8B, TOKENS, 23, CORES),
    "training_unsloth": ("unsloth", LLAMA3_8B, TOKENS, 23, CORES),
    "training_moe": ("unsloth", QWEN3_30B_A3B, MOE_TOKENS, 23, CORES),
    "whole_model": ("peft", WHOLE_LLAMA3_8B, TOKENS[1:3], 30, os.cpu_count()),
}


# --- processes ---


def in_new_process(*command, timeout: float, **options):
    """Run Python with `command`, which calls `answer`. Return what its function returns for the options;
    print what it printed.

    Raises RuntimeError with what the process printed.
    """
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes modules to its working directory
        command = [*command, json.dumps(options)]
        done = machine.python(command, folder=folder, variables=VARIABLES, timeout=timeout)
    *printed, result = done.out.splitlines()
    print(*printed, sep="\n")
    return json.loads(result)


def answer(function) -> None:
    """In such a process: call a function with the options, and print what it returns."""
    machine.prepare()
    print("\n" + json.dumps(function(**json.loads(sys.argv[-1]))))


# --- models ---


def tokenizer():
    """Return a tokenizer that reads bytes (transformers' fast class), with pad, bos and eos tokens."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = ByteLevelBPETokenizer({token: index for index, token in enumerate(tokens)}, [])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(raw.to_str()), **special)


def random_model(sizes: dict):
    """Return a random bf16 model. The same device and sizes give the same model.

    sizes, here and below: fields of the transformers config, model_type too.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = dict(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(**sizes, **ends, max_position_embeddings=LONGEST)
    torch.manual_seed(3407)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def unsloth_model(sizes: dict, dtype=torch.bfloat16):
    """Return a random model in doubly quantized NF4 with fresh LoRA adapters, made by Unsloth."""
    from unsloth import FastLanguageModel  # it asks to come before transformers

    with tempfile.TemporaryDirectory() as folder:
        random_model(sizes).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model, _ = FastLanguageModel.from_pretrained(
            model_name=folder,
            max_seq_length=LONGEST,
            dtype=dtype,
            load_in_4bit=True,
            use_exact_model_name=True,
            fix_tokenizer=False,
            use_gradient_checkpointing=False,
        )
    torch.manual_seed(3407)
    return FastLanguageModel.get_peft_model(model, **LORA, use_gradient_checkpointing=False)


def peft_model(sizes: dict, *, autocast=False, lora=LORA, nf4=NF4, **loading):
    """Return a random model in NF4 with fresh LoRA adapters, in training mode, as trl sets QLoRA up.

    autocast: adapters are fp32, not bf16. lora, nf4: fields of LoraConfig and BitsAndBytesConfig. loading:
    other arguments of from_pretrained.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    loading = dict(dtype=torch.bfloat16, device_map={"": DEVICE}, attn_implementation="sdpa") | loading
    quantization = BitsAndBytesConfig(bnb_4bit_compute_dtype=loading["dtype"], **nf4)
    random = random_model(sizes)  # its GPU quantizes it: 8B weights take seconds and no disk
    model = type(random).from_pretrained(
        None,
        config=random.config,
        state_dict=random.state_dict(),
        quantization_config=quantization,
        **loading,
    )
    model.config.use_cache = False
    torch.manual_seed(3407)
    config = LoraConfig(**lora, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=autocast).train()


# --- a step ---


@contextlib.contextmanager
def deterministic(warn_only=True):
    """Use deterministic algorithms inside the block. warn_only: not in fused attention, nor where an
    operation has none, which is a RuntimeError otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def digest(tensors) -> str:
    """Return the SHA-256 over the bytes of tensors, in hex."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy())
    return total.hexdigest()


class Trainer:
    """Trains a model's adapters; autocast: a dtype, or None."""

    def __init__(self, model, autocast=None, lr=1e-5):
        self.model = model
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=lr, fused=True)
        self.device = self.adapters[0].device
        self.autocast = torch.autocast(self.device.type, autocast, enabled=autocast is not None)

    def backward(self, ids) -> torch.Tensor:
        """Return the loss of a batch, with its gradients computed."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def results(self, ids) -> tuple[float, str]:
        """Return a batch's loss and a digest of its gradients; nothing is updated."""
        try:  # fused attention repeats its gradients only without warn_only
            with deterministic(warn_only=False):
                loss = self.backward(ids).item()
        except RuntimeError:  # an operation has none
            with deterministic():
                loss = self.backward(ids).item()
        return loss, digest(p.grad for p in self.adapters if p.grad is not None)

    def step(self, ids) -> None:
        self.backward(ids)
        self.optimizer.step()


# --- with the kernel and without ---


def variant(library: str, name: str):
    """Return a context manager: "with" the kernel in `library` and bitsandbytes, or without it."""
    from nf4_triton import use_nf4_kernel

    if name != "with":
        return contextlib.nullcontext()
    return use_nf4_kernel(library, "bitsandbytes", quiet=True, strict=True)


def handled(switch) -> int:
    """Return how many dequantizations went through the kernel while a switch was on; None: there is none."""
    return sum(calls["by the kernel"] for calls in switch.calls.values()) if switch else 0


def check(library: str, results) -> str:
    """Return the switch's report of one call of results(), which must be the same with the kernel.

    Raises AssertionError if it is not, or if the kernel dequantized nothing.
    """
    expected = results()
    if results() != expected:
        raise AssertionError("results differ from run to run without the kernel: not timed")
    with variant(library, "with") as switch:
        if results() != expected:
            raise AssertionError("results differ with the kernel, expected the same bits: not timed")
        if not handled(switch):
            raise AssertionError("the kernel dequantized nothing: not timed")
        return str(switch)


def speedup(times: dict[str, list[float]]) -> list[float]:
    """Return (low, median, high) of the rounds' ratios of times without the kernel to times with it.

    low, high: the 95% bootstrap interval of the median.
    """
    ratios = np.divide(times["without"], times["with"])
    resampled = np.random.default_rng(3407).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), (0.025, 0.975))
    return [low, float(np.median(ratios)), high]


def time_steps(library: str, sizes: dict, tokens, seconds: float) -> list:
    """Compare and time training steps of one library, which is not imported yet. The first error ends it.

    Returns (case, unit, {name: values}) of each; prints what dequantized in one step.
    """
    if library == "unsloth":  # adapters in fp32, under autocast
        trainers = {"Unsloth": Trainer(unsloth_model(sizes), torch.bfloat16)}
    else:
        kinds = {"PEFT nested": NF4, "PEFT flat": FLAT}
        trainers = {label: Trainer(peft_model(sizes, nf4=nf4)) for label, nf4 in kinds.items()}
    cases = []
    for shape in tokens:
        ids = torch.randint(sizes["vocab_size"], shape).to(DEVICE)
        case = f"{ids.numel()} tokens"
        timers = {}
        for label, trainer in trainers.items():
            print(f"{label}, {case}: {check(library, functools.partial(trainer.results, ids))}")
            step = functools.partial(trainer.step, ids)
            step()
            for name in VARIANTS:
                inside = functools.partial(variant, library, name)
                timers[label, name] = clocks.host_timer(step, COUNT, COUNT, inside, warm=False)
        times = clocks.in_turns(timers, MOST_ROUNDS, seconds * len(trainers))
        for label in trainers:
            ms = {name: [us / 1e3 for us in times[label, name]] for name in VARIANTS}
            cases.append((f"{label}, {case}", "ms", ms))
            cases.append((f"{label}, {case}", "x", {"speedup": speedup(ms)}))
    return cases


def time_training(section: str, problems: list[str]) -> Iterator[tuple]:
    """Yield training steps with and without the kernel."""
    library, sizes, tokens, seconds, cores = RUNS[section]
    options = dict(library=library, sizes=sizes, tokens=tokens, seconds=seconds)
    yield from in_new_process("-m", __name__, cores, timeout=500, **options)


if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    answer(time_steps)
