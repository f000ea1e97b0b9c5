"""Whether OUT answers as what was trained: transformers and PEFT load each, and predict a text's tokens."""

import warnings
from pathlib import Path

import torch
import transformers

from .export import in_4_bits, to_device, to_dtype
from .formats import loading
from .problems import UnsupportedState, library, say, spoken
from .sources import find

TEXT = """The lighthouse keeper's daughter counted ships: 3 on Monday, 7 on Tuesday. "Why so few?" she asked.
def mean(values): return sum(values) / len(values)
Die Summe von 2 und 3 ist 5. La somme de 2 et 3 est 5."""


def verify(source, out, base, trained_in, load_dtype, skip_modules, device, text) -> dict:
    """Compare models with what was trained: OUT and, for an adapter, its base alone. Holds one at a time.

    source to device: arguments of the export that wrote OUT. text: a file, or None.
    Returns {name: (mean KL divergence of the next tokens in nats, the share of equal most probable ones)}.
    """
    kind, rows = next_tokens(out)
    checkpoint, lora = find(source, base)
    ids = tokens(out, text, rows)
    place = {"device_map": {"": to_device(device)}, "use_safetensors": True}
    as_trained, how = loading(checkpoint), ""
    if as_trained:
        how = f", dequantized from {checkpoint.kind}"
    if trained_in:
        as_trained, how = {"quantization_config": in_4_bits(trained_in, skip_modules)}, f", in {trained_in}"
    with library(f"what was trained cannot be loaded as {kind.__name__}"), torch.no_grad():
        say(f"Loading {checkpoint.folder}{how}.")
        as_trained["dtype"] = to_dtype(load_dtype) or "auto"
        model = kind.from_pretrained(checkpoint.folder, **place, **as_trained)
        if model.config.get_text_config().vocab_size != rows:  # else BART would share modules
            model.resize_token_embeddings(rows, mean_resizing=False)
        trained = alone = log_probabilities(model, ids)
        if lora:
            import peft

            say(f"Loading the adapter {lora.folder}.")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Found missing adapter keys")
                model = peft.PeftModel.from_pretrained(model, lora.folder)
            trained = log_probabilities(model, ids)
    del model
    with library(f"{out} cannot be loaded as {kind.__name__}"), torch.no_grad():
        say(f"Loading {out}.")
        model = kind.from_pretrained(out, dtype="auto", **place)
        found = {spoken(str(out)): log_probabilities(model, ids)}
    found |= {"the base alone": alone} if lora else {}
    return {name: distance(trained, other) for name, other in found.items()}


def next_tokens(out) -> tuple:
    """Return the class of the model in OUT, and how many tokens it knows. Refuse one without next tokens."""
    if not Path(out, "config.json").is_file():
        raise UnsupportedState(f"{out} has no config.json, expected what the export wrote: check OUT")
    with library(f"{out}/config.json names no class of transformers"):
        config = transformers.AutoConfig.from_pretrained(out)
        kind = getattr(transformers, config.architectures[0])
    if not kind.can_generate():
        raise UnsupportedState(f"{kind.__name__} predicts no next tokens, expected a model that does")
    return kind, config.get_text_config().vocab_size


def tokens(out, text, rows):
    """Return at most 2,048 ids of a text, or random ones if OUT has no tokenizer."""
    content = Path(text).read_text(encoding="utf-8") if text else TEXT
    try:
        ids = transformers.AutoTokenizer.from_pretrained(out)(content, return_tensors="pt").input_ids
        if len(ids.unique()) < 9:
            raise ValueError  # where there is none, transformers makes an empty one
    except Exception as error:  # transformers raises many kinds
        say(f"{out} has no tokenizer that reads the text ({type(error).__name__}): 64 random tokens.")
        ids = torch.randint(rows, (1, 64), generator=torch.Generator().manual_seed(0))
    return ids[:, :2048].clamp(max=rows - 1)


def log_probabilities(model, ids):
    """Return those of each next token, on the CPU."""
    inputs = {"input_ids": ids.to(model.device)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return model.eval()(**inputs).logits[0].float().log_softmax(-1).cpu()


def distance(trained, other) -> tuple:
    """Return the mean KL divergence from what was trained, and the share of equal most probable tokens."""
    divergence = (trained.exp() * (trained - other)).sum(-1).mean()
    return divergence.item(), (trained.argmax(-1) == other.argmax(-1)).float().mean().item()
