"""What somebody typed, and what came was wrong."""

import json
import types

import pytest
import torch

import nf4_triton
from nf4_triton import __main__ as command_line

files = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", "5.15")

from nf4_triton import UnsupportedState, export_checkpoint  # noqa: E402
from nf4_triton.export import export, sources, write  # noqa: E402


def test_spaces_between_skipped_modules(monkeypatch):
    """With its space, a name fits no layer: it would be quantized without a word."""
    given = {}

    def record(source, out, **options):
        given.update(options)
        return types.SimpleNamespace(written=0, dequantized=0, merged=0)

    monkeypatch.setattr(nf4_triton, "export_checkpoint", record)
    monkeypatch.setattr(command_line, "missing", lambda *_: None)
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    assert command_line.main(["export", "a", "b", "--skip-modules", "lm_head, o_proj,"]) == 0
    assert given["skip_modules"] == ["lm_head", "o_proj"]


def test_the_home_of_nobody():
    for source, out in (("~nobody_here/a", "out"), (".", "~nobody_here/out")):
        with pytest.raises(UnsupportedState, match="~nobody_here"):
            export_checkpoint(source, out)


def test_a_local_base_has_no_revision(tmp_path, monkeypatch):
    """PEFT's config may name one; a local folder wins."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, name in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        (tmp_path / folder).mkdir()
        files.save_file({"a": torch.zeros(1)}, tmp_path / folder / name)
    for base in ("~/base", str(tmp_path / "base")):
        fields = {"base_model_name_or_path": base, "revision": "main"}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields))
        assert sources.find(tmp_path / "adapter")[0].folder == tmp_path / "base"


def test_a_partial_folder_may_be_in_use(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(UnsupportedState, match="another one writes it"):
        write.write(tmp_path / "out", {}, types.SimpleNamespace(made={}), 1, {}, [])


def test_a_base_whose_config_names_no_dtype():
    """transformers 5 loads such a base in the dtype of its weights, 4 in another one."""
    pytest.importorskip("bitsandbytes")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=1, vocab_size=9)
    with torch.device("meta"):
        built = transformers.GPT2LMHeadModel(config)
    built.config.dtype = None
    with pytest.raises(UnsupportedState, match="names no dtype"):
        export.how_trained("nf4", None, None, types.SimpleNamespace(tensors={}), built, "cpu")
