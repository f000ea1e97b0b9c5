"""OUT's README.md, from the cards of the base and of the adapter."""

import contextlib
import os
import re

from huggingface_hub import ModelCard

from .sources import inside


def new_card(checkpoint, lora, library) -> str:
    """Return the model card of a checkpoint in 16 bit, with an adapter merged. library: what loads it."""
    base, card = read_card(checkpoint.folder), read_card((lora or checkpoint).folder)
    names = checkpoint.name, lora and lora.config.get("base_model_name_or_path"), base.data.get("base_model")
    on_hub = [re.fullmatch(r"(\w[\w.-]*/[\w.-]+)(@.*)?", str(name)) for name in names]
    name = next((found[1] for found in on_hub if found and not os.path.exists(found[0])), None)
    if not lora or card.data.get("library_name", "peft") == "peft":  # PEFT's text is of the adapter
        card.text = f"\n{name or 'A model'}{' with an adapter merged' if lora else ''}, in 16 bit.\n"
    tags = [
        tag for tag in card.data.get("tags") or () if not re.match(r"(lora|peft|base_model:.*)$", str(tag))
    ]
    fields = {"base_model": name, "library_name": library, "tags": tags or None}
    for key in ("license", "license_name", "license_link"):
        fields[key] = base.data.get(key)
    for key in fields:
        card.data[key] = fields[key]
    return str(card)


def read_card(folder):
    """Return a folder's model card, or an empty one if it cannot be read."""
    with contextlib.suppress(Exception):  # of YAML
        path = inside(folder, "README.md")
        if path.stat().st_size < 1e6:
            return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    return ModelCard("---\n{}\n---\n")
