"""Small random Llama and Qwen models whose tokenizer reads bytes: training without downloads."""

from pathlib import Path

SIZES = dict(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    vocab_size=320,  # what the tokenizer knows, and some
)
LLAMA3_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    vocab_size=32000,
)


def tokenizer():
    """A tokenizer that reads bytes (transformers' fast class), with pad, bos and eos tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def make(folder, family: str = "llama", device: str = "cpu", **sizes) -> Path:
    """Save a random bf16 model of a family (llama, qwen2, qwen3) with its tokenizer in `folder`; returns it.

    `sizes` are fields of the transformers config, over SIZES; pass LLAMA3_8B for real layer sizes. The same
    device and sizes give the same model.
    """
    import torch
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
