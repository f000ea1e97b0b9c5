"""OUT's README.md, from the cards of the base and of the adapter."""

import re

from .sources import on_hub, read_card


def new_card(checkpoint, lora, library) -> str:
    """Return the model card of a checkpoint in 16 bit, with an adapter merged. library: what loads it."""
    base, card = read_card(checkpoint.folder), read_card((lora or checkpoint).folder)
    trained_on = lora and lora.config.get("base_model_name_or_path")
    name = on_hub(checkpoint.name, trained_on, base.data.get("base_model"))
    if not lora or card.data.get("library_name", "peft") == "peft":  # PEFT's text describes the adapter
        card.text = f"\n{name or 'A model'}{' with an adapter merged' if lora else ''}, in 16 bit.\n"
    tags = [
        tag for tag in card.data.get("tags") or () if not re.match(r"(lora|peft|base_model:.*)$", str(tag))
    ]
    fields = {key: base.data.get(key) for key in ("license", "license_name", "license_link")}
    fields |= {"base_model": name, "library_name": library, "tags": tags or None}
    for key, value in fields.items():
        card.data[key] = value
    return str(card)
