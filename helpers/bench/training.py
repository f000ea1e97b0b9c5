"""GPU time of QLoRA steps with the kernel and without: real libraries on random models, in new processes.

Sections of `python -m helpers bench`, named in RUNS. A step's GPU time is the sum of its kernels' durations.
Loss and gradients must be bit-identical with and without the kernel, or nothing is measured. Unsloth changes
the other libraries for good, and asks to be imported first, so each section runs in two new processes, one
after the other. A row has a value from each.
"""

import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from helpers import machine
from helpers.bench.contenders import why
from helpers.puzzle.layers import DEVICE, ON_GPU
from helpers.puzzle.protocol import synchronize
from nf4_triton.core.reference import same_bits

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
# For processes that train: the hub is not asked, and cuBLAS is deterministic.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TEARDOWN_CUPTI": "1",  # otherwise the profiler stays attached, and calls take 18 us, not 10 (H200)
}
VARIANTS = ("without", "with")
PROCESSES = 2  # for each section
TOKENS = ((1, 128), (1, 512), (1, LONGEST), (4, LONGEST))  # sequences, tokens in each
CHECKPOINTED = ((1, LONGEST),)  # for PEFT nested, with gradient checkpointing
MOE_TOKENS = ((1, 16), (1, 128), (1, 1024))
RUNS = {  # section: library, sizes of its model, tokens
    "step_gpu_time": ("peft", WHOLE_LLAMA3_8B, TOKENS),
    "step_gpu_time_unsloth": ("unsloth", LLAMA3_8B, TOKENS),
    "step_gpu_time_moe": ("unsloth", QWEN3_30B_A3B, MOE_TOKENS),
}


# --- processes ---


def in_new_process(function: Callable, *arguments):
    """Return function(*arguments) from a new process in its own folder: Unsloth writes modules there."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, VARIABLES),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_up, (folder,)) as pool,
    ):
        return pool.submit(function, *arguments).result()


def set_up(folder: str) -> None:
    """Prepare the new process before its function imports a library."""
    os.chdir(folder)
    machine.prepare()


# --- models ---


def tokenizer():
    """Return a byte-level tokenizer (transformers' fast class) with pad, bos, and eos tokens."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = ByteLevelBPETokenizer({token: index for index, token in enumerate(tokens)}, [])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(raw.to_str()), **special)


def random_model(sizes: dict):
    """Return a random bf16 model. The same device and sizes give the same model.

    sizes, here and below: fields of the transformers config, including model_type.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = dict(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(**sizes, **ends, max_position_embeddings=LONGEST)
    torch.manual_seed(3407)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def unsloth_model(sizes: dict, dtype=torch.bfloat16):
    """Return a random model in double-quantized NF4 with new LoRA adapters, made by Unsloth."""
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
    """Return a random model in NF4 with new LoRA adapters, in training mode, as TRL sets QLoRA up.

    autocast: whether adapters are fp32, not bf16. lora, nf4: fields of LoraConfig and BitsAndBytesConfig.
    loading: other arguments of from_pretrained.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    loading = dict(dtype=torch.bfloat16, device_map={"": DEVICE}, attn_implementation="sdpa") | loading
    quantization = BitsAndBytesConfig(bnb_4bit_compute_dtype=loading["dtype"], **nf4)
    random = random_model(sizes)  # quantized on its GPU: 8B weights take seconds and no disk
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


class Trainer:
    """Trains a model's adapters. autocast: a dtype, or None."""

    def __init__(self, model, autocast=None, lr=1e-5):
        self.model = model
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=lr, fused=True)
        self.device = self.adapters[0].device
        self.autocast = torch.autocast(self.device.type, autocast, enabled=autocast is not None)

    def backward(self, ids) -> torch.Tensor:
        """Compute the gradients of a batch. Return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def results(self, ids) -> list[torch.Tensor]:
        """Return a batch's loss and its gradients, from deterministic algorithms. Updates nothing."""
        before = torch.are_deterministic_algorithms_enabled()
        try:
            torch.use_deterministic_algorithms(True)
            loss = self.backward(ids)
        except RuntimeError:  # an operation has none. With warn_only, fused attention is not deterministic.
            torch.use_deterministic_algorithms(True, warn_only=True)
            loss = self.backward(ids)
        finally:
            torch.use_deterministic_algorithms(before, warn_only=True)
        return [loss, *(p.grad for p in self.adapters if p.grad is not None)]

    def step(self, ids) -> None:
        self.backward(ids)
        self.optimizer.step()


# --- with the kernel and without ---


def variant(library: str, name: str):
    """Return a context manager that switches the kernel on in a library and bitsandbytes for "with"."""
    from nf4_triton import use_nf4_kernel

    if name != "with":
        return contextlib.nullcontext()
    return use_nf4_kernel(library, "bitsandbytes", quiet=True, strict=True)


def handled(switch) -> int:
    """Return how many dequantizations the kernel handled while a switch was on; 0 without a switch."""
    return sum(calls["by the kernel"] for calls in switch.calls.values()) if switch else 0


def check(library: str, results) -> str:
    """Return the switch's report on one call of results().

    Raises AssertionError if results() differs with the kernel, or if the kernel dequantized nothing.
    """
    expected = results()
    with variant(library, "with") as switch:
        found = results()
        if not all(map(same_bits, found, expected)):
            raise AssertionError("loss or gradients differ with the kernel: not measured")
        if not handled(switch):
            raise AssertionError("the kernel dequantized nothing: not measured")
        return str(switch)


# --- time of a step ---


def gpu_events(step: Callable) -> list:
    """Return the GPU events of a step from the profiler, without the ranges that torch.compile marks."""
    activity = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:  # its end waits for the GPU
        step()
    events = profiled.events()
    return [
        event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def sums(ran: list) -> dict[str, float]:
    """Return {unit: sum} of a step's GPU events. Kernels that dequantize are recognized by their names."""

    def ms(name):
        return sum(event.time_range.elapsed_us() for event in ran if name in event.name.lower()) / 1e3

    return {"GPU ms": ms(""), "GPU ms dequantizing": ms("dequant"), "launches": len(ran)}


def measure(step: Callable) -> dict[str, float]:
    """Return {unit: value} of two steps, one timed by the wall clock, one profiled, after a warm-up step."""
    step()
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    wall = 1e3 * (time.perf_counter() - start)
    return {**sums(gpu_events(step)), "wall ms": wall}


def compare(library: str, trainer: Trainer, ids) -> list[tuple]:
    """Return (unit, variant, value) for steps without the kernel, then for steps with it."""
    step, found = functools.partial(trainer.step, ids), []
    for name in VARIANTS:
        with variant(library, name):
            found += [(unit, name, value) for unit, value in measure(step).items()]
    return found


def trainers_of(library: str, sizes: dict, tokens) -> Iterator[tuple]:
    """Yield (what to train, its trainer, tokens), one model after the other."""
    if library == "unsloth":  # adapters in fp32, under autocast
        yield "Unsloth", Trainer(unsloth_model(sizes), torch.bfloat16), tokens
        return
    for label, nf4 in (("PEFT nested", NF4), ("PEFT flat", FLAT)):
        trainer = Trainer(peft_model(sizes, nf4=nf4))
        yield label, trainer, tokens
        if nf4 is NF4:
            how = {"use_reentrant": False}
            trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            yield f"{label}, checkpointing", trainer, CHECKPOINTED


def time_steps(library: str, sizes: dict, tokens) -> tuple[list[tuple], list[str]]:
    """Return (case, unit, variant, value) of all steps, and what went wrong. Print the switch's reports.

    library: must not be imported yet.
    """
    found, problems = [], []
    for label, trainer, shapes in trainers_of(library, sizes, tokens):
        for shape in shapes:
            ids = torch.randint(sizes["vocab_size"], shape).to(DEVICE)
            case = f"{label}, {ids.numel()} tokens"
            try:
                report = check(library, functools.partial(trainer.results, ids))
                print(f"{case}: {report}", flush=True)
                found += [(case, *values) for values in compare(library, trainer, ids)]
            except (AssertionError, torch.OutOfMemoryError) as error:
                problems.append(f"{case}: {why(error)}")
            torch.cuda.empty_cache()
    return found, problems


def time_section(section: str, problems: list[str]) -> Iterator[tuple]:
    """Yield the values of training steps with the kernel and without, one from each process."""
    steps = {}
    for _ in range(PROCESSES):
        found, wrong = in_new_process(time_steps, *RUNS[section])
        problems += wrong
        for case, unit, name, value in found:
            steps.setdefault((case, unit), {}).setdefault(name, []).append(value)
    for (case, unit), values in steps.items():
        yield case, unit, values
