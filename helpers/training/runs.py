"""What every QLoRA run here is made of: the adapted model, determinism, names of the kernels that decode."""

import contextlib
import hashlib
import os

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEQUANTIZERS = {  # what the profiler calls the kernels that dequantize, by who launches them
    "ours": "_your_dequantize_nf4_kernel",
    "bitsandbytes": "kDequantizeBlockwise",
    "unsloth": "_nf4_dequant_kernel",
}
# For processes that train: nothing is looked up, and cuBLAS repeats its results.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def adapted(
    folder, library, dtype, rank, context=512, attention="eager", autocast=False, checkpointing=False, **more
):
    """A model of tiny_models, loaded in 4 bit from disk, with fresh LoRA adapters; in training mode.

    context: the longest sequence, for Unsloth. attention: for PEFT, "eager" repeats bit for bit on every
    card. autocast: PEFT's adapters are fp32. more: fields of PEFT's LoraConfig.
    """
    import torch

    dtype = getattr(torch, dtype)
    lora = dict(r=rank, lora_alpha=2 * rank, target_modules=MODULES, **more)
    torch.manual_seed(3407)
    if library == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            model_name=folder,
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

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
        attn_implementation=attention,
        local_files_only=True,
    )
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    config = LoraConfig(**lora, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=autocast).train()


@contextlib.contextmanager
def deterministic(strict: bool = False):
    """Deterministic algorithms, so that runs can be compared bit for bit.

    Fused attention's backward is deterministic only if `strict`. Then an operation that has no deterministic
    implementation raises RuntimeError; otherwise it runs, with a warning.
    """
    import torch

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
    """SHA-256 over the bytes of tensors, 16 hex digits."""
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        total.update(flat.cpu().numpy().tobytes())
    return total.hexdigest()[:16]
