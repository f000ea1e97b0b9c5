"""Small random Llama and Qwen models with a real tokenizer, made on the spot: training without downloads."""

from pathlib import Path

# What the tokenizer learns from.
TEXT = """A quantized weight is stored as codes of four bits, two in a byte, the first in the high half.
Sixty-four codes in a row share one scale, and the scales themselves are stored as bytes.
To multiply, the codes are looked up, scaled and rounded once; the result is the weight again.
A small adapter beside each frozen layer learns what the large weights do not know yet.
Training reads every frozen weight twice: once on the way forward and once on the way back.
If both ways give the same bits, the loss curve is the same curve, however the bits were made.
Speed that changes a result is not speed, and a result nobody checked is not a result.
"""
SIZES = dict(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LLAMA3_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    vocab_size=32000,
)
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # as transformers' classes are called


def tokenizer():
    """A byte-level BPE tokenizer trained on TEXT (transformers' fast class), with bos, eos and pad tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=512,
        padding_side="right",
    )


def make(folder, family: str = "llama", device: str = "cpu", **sizes) -> Path:
    """Save a random bf16 model of a family (llama, qwen2, qwen3) with its tokenizer in `folder`; returns it.

    `sizes` are fields of the transformers config, over SIZES; pass LLAMA3_8B for real layer sizes. The same
    device and sizes give the same model.
    """
    import torch
    import transformers

    words = tokenizer()
    sizes = {**SIZES, "vocab_size": len(words), **sizes}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(
        **sizes,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        tie_word_embeddings=False,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    with torch.random.fork_rng(devices=[] if device == "cpu" else None), torch.device(device):
        torch.manual_seed(3407)
        model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).to(torch.bfloat16)
    folder = Path(folder)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def load(folder, dtype, attention: str):
    """The model in `folder`, quantized to 4 bit (nf4, nested) while it is read from disk; frozen.

    It computes in `dtype`.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=settings,
        device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
        attn_implementation=attention,
        local_files_only=True,
    )
    model.config.use_cache = False
    return model
