"""Plain torch pipelines from checkpoints: the right class, and a tokenizer from where there is one."""

from __future__ import annotations

import shutil

import huggingface_hub
import pytest
import torch

from sdaccel.errors import ModelError
from sdaccel.models import open_checkpoint
from sdaccel.models.pipeline import load_pipeline
from tests.models import tiny


@pytest.fixture
def no_network(monkeypatch):
    """Only folders of this machine answer."""

    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)


def single_file(kind, tmp_path):
    pipe = tiny.pipeline(kind, tmp_path / "made")
    path = tmp_path / "file" / "model.safetensors"
    path.parent.mkdir()
    return pipe, tiny.save_single_file(tiny.original_weights(pipe, kind), path)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_class_of_each_variant(kind, tmp_path):
    pipe, path = single_file(kind, tmp_path)
    tokenizer = tmp_path / "made" / ("tokenizer_2" if kind == "sdxl-refiner" else "")
    loaded = load_pipeline(open_checkpoint(path), dtype=torch.float16, tokenizer=tokenizer)
    assert type(loaded) is type(pipe)
    assert loaded.unet.dtype == loaded.vae.dtype == torch.float16
    for name in ("tokenizer", "tokenizer_2"):
        own = getattr(pipe, name, None)
        assert (own is None) == (getattr(loaded, name, None) is None)
        if own is not None:
            found = getattr(loaded, name)
            text = {"padding": "max_length", "max_length": 77, "truncation": True}
            assert found("a red circle", **text).input_ids == own("a red circle", **text).input_ids
            assert found.model_max_length == 77
    assert getattr(loaded, "safety_checker", None) is None
    assert not any(tensor.is_meta for tensor in [*loaded.unet.buffers(), *loaded.unet.parameters()])


def test_tokenizer_beside_the_file(no_network, tmp_path):
    _, path = single_file("sd1", tmp_path)
    with pytest.raises(ModelError, match=r"a single file has no tokenizer.*tokenizer=<folder"):
        load_pipeline(open_checkpoint(path))
    tiny.write_tokenizer(path.parent / "tokenizer")
    assert load_pipeline(open_checkpoint(path)).tokenizer.tokenize("red circle") == ["red</w>", "circle</w>"]
    with pytest.raises(ModelError, match="no such folder"):
        load_pipeline(open_checkpoint(path), tokenizer=tmp_path / "none")
    (path.parent / "tokenizer" / "merges.txt").write_text("<html>", encoding="utf-8")
    with pytest.raises(ModelError, match=r"its tokenizer cannot be read .*Download it again"):
        load_pipeline(open_checkpoint(path))
    (path.parent / "tokenizer" / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer in it \(tokenizer.json, or vocab\.json and merges\.txt\)"):
        load_pipeline(open_checkpoint(path), tokenizer=path.parent)


def test_tokenizer_of_the_hub(monkeypatch, tmp_path):
    _, path = single_file("sd2", tmp_path)
    hub = tiny.write_tokenizer(tmp_path / "hub")
    asked = []

    def download(repository, name, local_files_only):
        asked.append((repository, local_files_only))
        if local_files_only:
            raise OSError("not in the cache")
        return str(hub / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    tokenizer = load_pipeline(open_checkpoint(path)).tokenizer
    assert tokenizer.tokenize("red circle") == ["red</w>", "circle</w>"]
    assert tokenizer.pad_token == "!" and tokenizer.model_max_length == 77
    assert asked[0] == ("openai/clip-vit-large-patch14", True)


@pytest.mark.parametrize("kind", ["sd1-edit", "sdxl", "sdxl-refiner"])
def test_folders(kind, tmp_path):
    pipe = tiny.pipeline(kind, tmp_path / "made")
    pipe.save_pretrained(tmp_path / "model")
    loaded = load_pipeline(open_checkpoint(tmp_path / "model"))
    assert type(loaded) is type(pipe)
    for name in open_checkpoint(pipe).components:
        expected, found = getattr(pipe, name).state_dict(), getattr(loaded, name).state_dict()
        assert expected.keys() == found.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_folder_whose_tokenizer_is_incomplete(tmp_path):
    """transformers 5 makes a tokenizer without a single word of it, which reads every prompt alike."""
    pipe = tiny.pipeline("sdxl", tmp_path / "made")
    pipe.save_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "tokenizer")
    (tmp_path / "model" / "tokenizer_2" / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model: tokenizer is missing or incomplete .*--tokenizer"):
        load_pipeline(checkpoint)
    loaded = load_pipeline(checkpoint, tokenizer=tmp_path / "made")
    for name in ("tokenizer", "tokenizer_2"):
        own, found = getattr(pipe, name), getattr(loaded, name)
        assert found("a red circle").input_ids == own("a red circle").input_ids
        assert found.pad_token == own.pad_token


def test_a_folder_that_diffusers_cannot_load(tmp_path):
    tiny.pipeline("sd1", tmp_path / "made").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not JSON"):
        open_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(ModelError, match="diffusers cannot load it"):
        load_pipeline(open_checkpoint(tmp_path / "model"))


def test_a_vocabulary_that_is_an_html_page(tmp_path):
    tiny.pipeline("sd1", tmp_path / "made").save_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "tokenizer")
    tiny.write_tokenizer(tmp_path / "model" / "tokenizer")
    (tmp_path / "model" / "tokenizer" / "vocab.json").write_text("<!doctype html>", encoding="utf-8")
    with pytest.raises(ModelError, match="diffusers cannot load it"):
        load_pipeline(open_checkpoint(tmp_path / "model"))
