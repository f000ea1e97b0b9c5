"""Two oracles of an export: the model that was trained, and PEFT's merge into what libraries dequantize."""

import pytest
import torch

from helpers.puzzle.layers import DEVICE
from nf4_triton.core.reference import same_bits

files = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton import export_checkpoint  # noqa: E402

INPUTS = {  # class: {input: shape}, beside tokens; SD3 takes none
    "CLIPModel": {"pixel_values": (8, 3, 28, 28)},
    "SD3Transformer2DModel": {
        "hidden_states": (1, 16, 8, 8),
        "encoder_hidden_states": (1, 4, 64),
        "pooled_projections": (1, 64),
        "timestep": (1,),
    },
}


def load(kind, folder, whole=True, **how):
    """Return the model in a folder. Fail unless the folder has the whole of it and nothing else."""
    how = ({"torch_dtype": torch.bfloat16} if "SD3" in kind.__name__ else {"dtype": "auto"}) | how
    model, found = kind.from_pretrained(folder, output_loading_info=True, **how)
    assert not (whole and any(found.values())), found
    return model.to(DEVICE)


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= files.load_file(file, DEVICE)
    return found


def train(model, adapter, **how):
    """Return a model with an adapter of random values, which is saved."""
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear"} | how))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    tuned.save_pretrained(adapter)
    return tuned


def answer(model):
    """Return logits or hidden states for fixed inputs, computed in float32 from a model's weights."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    model.eval()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # of Linear4bit, which rounds its scales on a CPU for inference
            module.compute_dtype, module.compute_type_is_set, module.training = torch.float32, True, True
    kind = type(getattr(model, "get_base_model", lambda: model)()).__name__
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in INPUTS.get(kind, {}).items()}
    if "hidden_states" not in inputs:
        inputs["input_ids"] = torch.tensor([[3, 9, 7, 50, 3, 60]])
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        return model(**{name: x.to(DEVICE) for name, x in inputs.items()})[0]


def check_answer(exported, tuned, base, limit=0.05):
    """Fail unless OUT answers as the adapter does, unmerged. limit: what rounding may cost of its effect."""
    got, trained, base = (answer(model) for model in (exported, tuned, base))
    assert (got - trained).abs().mean() < limit * (base - trained).abs().mean()


def same(one, other):
    """Return whether tensors are equal, bit for bit but for the signs of zeros, which fp4 leaves open."""
    return same_bits(one + 0, other + 0)


def check_bits(exported, counts, out, base, folder, adapter):
    """Fail unless OUT's bits are those of PEFT's merge into a base. folder: a file of that base."""
    before, written = tensors_of(folder) | base.state_dict(), tensors_of(out)
    before = {key: tensor.clone() for key, tensor in before.items()}
    tuned = peft.PeftModel.from_pretrained(base, adapter)
    for module in tuned.modules():  # PEFT merges a change of a tied parameter into all: none is tied here
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.data.clone(), False)
    merge = tuned.merge_and_unload().state_dict()
    if any(".default" in key for key in merge):  # PEFT cannot unload two layers of one parameter
        return
    first: dict = {}
    for key, parameter in exported.named_parameters(remove_duplicate=False):  # a tied one is as the first
        merge[key] = merge[first.setdefault(id(parameter), key)]
    assert not [key for key, tensor in exported.state_dict().items() if not same(tensor, merge[key])]
    changed = {key for key in written if not same(written[key].float(), before[key].float())}
    assert counts.written == len(written) and counts.merged == len(changed) > 0


def check_merge(load_trained, load_base, base, stored, place, how, limit=0.05, **options):
    """Fail unless a base with an adapter is exported as it answers in training, and as PEFT merges it.

    load_trained, load_base: return the model as training has it, and in 16 bit. base, stored: their folders.
    """
    tuned = train(load_trained(), place / "adapter", **how)
    counts = export_checkpoint(place / "adapter", place / "out", base=base, **options)
    exported = load(type(tuned.get_base_model()), place / "out")
    check_bits(exported, counts, place / "out", load_base(), stored, place / "adapter")
    check_answer(exported, tuned, load_trained(), limit)
