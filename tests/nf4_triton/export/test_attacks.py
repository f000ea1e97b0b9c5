"""What attacks on the export and on verify found."""

import sys
from unittest import mock

import pytest
import torch

files = pytest.importorskip("safetensors.torch")
pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton import export_checkpoint  # noqa: E402
from nf4_triton.export import model, sources  # noqa: E402
from nf4_triton.export.verify import verify  # noqa: E402
from oracles import load, train  # noqa: E402

TIED = [("BertLMHeadModel", "decoder"), ("BartForConditionalGeneration", "embed_tokens")]


@pytest.mark.parametrize("name, target", TIED)
def test_what_is_tied(tmp_path, name, target):
    """A bias, too. verify must not make one module of two; OUT has no tokenizer."""
    kind, (base, adapter, out) = getattr(transformers, name), map(tmp_path.joinpath, "abc")
    sizes = dict(vocab_size=64, hidden_size=64, num_attention_heads=4, encoder_layers=1, decoder_layers=1)
    kind(kind.config_class(**sizes)).save_pretrained(base)
    train(load(kind, base), adapter, target_modules=[target])
    export_checkpoint(adapter, out, base=base)
    (got, _), (alone, _) = verify(adapter, out, base, *[None] * 5).values()
    assert got < alone / 4 and load(kind, out)


def test_a_quantized_head_in_an_adapter(tmp_path, monkeypatch):
    """Then what is said where PEFT is missing."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    sizes = dict(vocab_size=64, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(base)
    train(load(transformers.LlamaForCausalLM, base), adapter)
    file = adapter / "adapter_model.safetensors"
    state = {"base_model.model.lm_head.weight.quant_state.bitsandbytes__nf4": torch.ones(9).byte()}
    files.save_file(files.load_file(file) | state, file)
    with pytest.raises(ValueError, match="save it with save_embedding_layers=False"):
        export_checkpoint(adapter, tmp_path / "out", base=base)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        export_checkpoint(adapter, tmp_path / "out", base=base)


@pytest.mark.parametrize("width, labels", [(64, 99), (0, 0)])
def test_labels_of_a_head(caplog, width, labels):
    """An empty head does not say how many there are."""
    caplog.set_level("INFO", "nf4_triton")
    with torch.device("meta"):
        config = transformers.LlamaConfig(hidden_size=width, head_dim=16, num_hidden_layers=1)
        built = transformers.LlamaForSequenceClassification(config)
    head = mock.Mock(**{"get_tensor.return_value": torch.ones(99, width)})
    found = model.with_sizes({}, built, mock.Mock(tensors={"score.weight": head}))
    assert len(found.get("id2label", ())) == labels and ("LABEL_0" in caplog.text) == bool(labels)


def test_what_is_nested_counts(tmp_path):
    (tmp_path / "a").write_text(2_500_001 * "[:")
    with pytest.raises(ValueError, match="5 million values"):
        sources.read_json(tmp_path, "a")
