"""The benchmark of LoRA: ways that are what their names say, bytes by formula and by autograd's own hooks, interleaved
steps, runs with adapters, and a page without invented figures."""

import argparse
import json
import shlex
import sys

import pytest
import torch

from benchmarks import common, lora, lora_activations, lora_memory, lora_step, quality, sotu_lm
from benchmarks.held_bytes import held_bytes
from benchmarks.lora_ways import (
    EXACT,
    EXACT_ALONE,
    NARROW,
    NO_UPCAST,
    PEFT,
    RANK,
    VELORA,
    VELORA_NARROW,
    Way,
    adapted,
    config_of,
)
from hf_memopt.activations.lora import LoraFactor

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
}
TOKENS = 24
H, MLP, KV, HEADS = 64, 192, 32, 4
BYTES = {
    PEFT: 36 * H + 4 * KV + 10 * MLP + 28 * RANK + 4 * HEADS + 8,
    NARROW: 16 * H + 4 * KV + 8 * MLP + 14 * RANK + 4 * HEADS + 8,
    EXACT: 8 * H + 4 * KV + 4 * MLP + 14 * RANK + 4 * HEADS,
}
"""Bytes a token and block of LoRA, as docs/lora.md has them."""


def measured(way):
    if way.adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    return lora_activations.measure("tiny", way, TOKENS, SIZES)


@pytest.mark.parametrize("memory", BYTES)
def test_a_block_keeps_what_the_formula_says(memory):
    found = measured(Way("lora", memory))
    assert found["block_bytes"] == TOKENS * BYTES[memory]
    assert found["model_bytes"] > SIZES["num_hidden_layers"] * found["block_bytes"]
    highest = found["peak"]
    assert highest["nbytes"] == sum(highest["components"].values())
    assert highest["nbytes"] >= highest["components"]["weights"] + found["model_bytes"]


def test_ways_of_qlora_keep_what_those_of_lora_keep_but_for_the_upcast():
    blocks = {memory: measured(Way("qlora", memory))["block_bytes"] for memory in (PEFT, NO_UPCAST, NARROW, EXACT)}
    assert blocks[NARROW] == TOKENS * BYTES[NARROW] and blocks[EXACT] == TOKENS * BYTES[EXACT]
    assert blocks[PEFT] > blocks[NO_UPCAST] > blocks[NARROW]


def test_compression_checkpointing_and_dropout_show_in_the_bytes():
    def block(memory, **more):
        return measured(Way("lora", memory, **more))["block_bytes"]

    assert block(EXACT_ALONE) == TOKENS * BYTES[NARROW]
    assert block("compressed:0.125:none") < block("compressed:0.25:none") < block(EXACT_ALONE)
    assert block(EXACT, checkpointing=True) == TOKENS * 2 * H
    assert block(PEFT, dropout=0.05) > TOKENS * BYTES[PEFT]
    assert block(EXACT, dropout=0.05) == TOKENS * BYTES[EXACT]


@pytest.mark.parametrize("way", [w for w in lora_activations.WAYS if w.adapter == "lora"][::2], ids=lambda w: w.name)
def test_tensors_without_storage_give_the_bytes_of_real_ones(way):
    if not lora_activations.can_be_fake(way):
        pytest.skip("VeLoRA looks at values")
    fake = lora_activations.measure("tiny", way, TOKENS, SIZES, fake=True)
    real = measured(way)
    assert fake["block_bytes"] == real["block_bytes"] and fake["model_bytes"] is None
    assert real["model_bytes"] > 0


def saved_by_hooks(model, forward):
    """Unique storages that go through autograd's saved tensors, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())


@pytest.mark.parametrize("memory", [PEFT, VELORA, EXACT, "compressed:0.25:none"])
def test_held_bytes_are_those_of_saved_tensors(memory):
    model, _ = adapted(lora_activations._shaped(SIZES, TOKENS, Way()), Way("lora", memory))
    ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))

    def forward():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    held, _ = held_bytes(model, forward)
    saved = saved_by_hooks(model, forward)
    # the batch is among the saved tensors, and forward has not made it; VeLoRA's direction is a buffer, not an
    # activation: 1 feature of 64 groups, fp32, in 7 layers of 2 blocks, 3 features where the input is wider
    directions = 4 * (6 * 1 + 3) * 2 if memory == VELORA else 0
    assert held <= saved <= held + 2 * ids.nbytes + directions


def test_a_way_is_what_its_name_says():
    model = lora_activations._shaped(SIZES, TOKENS, Way())
    patched, handle = adapted(model, Way("lora", "compressed:0.125:norms", dropout=0.1))
    assert (handle.config.tier, handle.config.rank, handle.config.recompute) == ("compressed", 0.125, "norms")
    assert isinstance(patched.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"], LoraFactor)
    factors = {}
    for memory in (PEFT, NARROW, VELORA, VELORA_NARROW):
        model, handle = adapted(lora_activations._shaped(SIZES, TOKENS, Way()), Way("lora", memory))
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        factors[memory] = layer.lora_A["default"].weight.dtype, bool(layer.lora_variant)
        assert handle is None
    assert factors == {
        PEFT: (torch.float32, False),
        NARROW: (torch.bfloat16, False),
        VELORA: (torch.float32, True),
        VELORA_NARROW: (torch.bfloat16, True),
    }


@pytest.mark.parametrize(
    "given",
    [("lora", "compressed"), ("lora", "exact:none:mlp"), ("lora", "compressed:x"), ("qlora", VELORA), ("dora", PEFT)],
)
def test_what_does_not_exist_is_refused(given):
    with pytest.raises(ValueError):
        Way(*given)


def test_the_seed_reaches_the_package_and_an_int_is_a_number_of_dimensions():
    assert config_of("compressed:8", 3).rank == 8 and config_of("compressed:8", 3).seed == 3
    assert config_of(PEFT) is None


def test_a_configuration_has_one_file_and_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lora_activations, "MODELS", {"tiny": SIZES})
    monkeypatch.setattr(lora_activations, "WAYS", [Way(), Way("lora", EXACT)])
    lora_activations.run(tmp_path)
    found = lora_activations.load(tmp_path)
    assert list(found["tiny"]) == ["lora-none", "lora-exact"]
    monkeypatch.setattr(lora_activations, "measure", None)
    lora_activations.run(tmp_path)


def test_rounds_go_on_where_they_stopped_and_exact_ways_have_the_same_losses(tmp_path):
    names = (PEFT, EXACT, "compressed:0.25:none")
    ways = [*(Way("lora", memory) for memory in names), Way("lora", PEFT, checkpointing=True)]
    path = lora_step.path_of(tmp_path, "llama-3-8b-block", "float32")
    lora_step.measure("float32", 1, path, ways, SIZES)
    first = json.loads(path.read_text())
    lora_step.measure("float32", 2, path, ways, SIZES)
    read = lora_step.load(tmp_path)["llama-3-8b-block", "float32"]["configurations"]
    for name, found in read.items():
        assert len(found["seconds"]) == 2 and found["seconds"][:1] == first["configurations"][name]["seconds"]
    plain, exact, compressed, checkpointed = (read[way.name] for way in ways)
    assert plain["losses"][0] == exact["losses"][0] == checkpointed["losses"][0] != compressed["losses"][0]
    assert exact["activation_bytes"] < plain["activation_bytes"]
    assert not any(way.narrow for way in lora_step.ways_of("float32"))


def test_a_peak_is_simulated_once_and_smaller_with_less_kept(tmp_path, monkeypatch):
    ways = [Way(), Way("lora", NARROW), Way("lora", EXACT), Way("lora", EXACT, checkpointing=True)]
    monkeypatch.setattr(lora_memory, "WAYS", ways)
    lora_memory.run(tmp_path, {**SIZES, "num_hidden_layers": 6}, TOKENS)
    found = [record["memory"] for record in lora_memory.load(tmp_path).values()]
    kept = [memory["after"]["forward"]["components"]["activations"] for memory in found]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(ways)
    assert found[0]["peak_bytes"] > found[2]["peak_bytes"] > 0
    monkeypatch.setattr(lora_memory, "simulate", None)
    lora_memory.run(tmp_path, SIZES, TOKENS)


@pytest.fixture
def tiny_task(monkeypatch):
    """The task `sotu-lm` on a tiny model and random tokens."""
    blocks = torch.randint(0, SIZES["vocab_size"], (12, 16), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sotu_lm, "blocks", lambda: (blocks[:8], blocks[8:]))
    monkeypatch.setattr(sotu_lm, "load_base", lambda way, dtype: lora_activations._shaped(SIZES, 16, way))


@pytest.mark.parametrize(
    ("adapter", "memory"), [("lora", PEFT), ("lora", EXACT), ("lora", VELORA), ("qlora", "compressed:0.25:none")]
)
def test_quality_trains_adapters(tiny_task, tmp_path, monkeypatch, adapter, memory):
    if adapter == "qlora":
        pytest.importorskip("bitsandbytes")
    words = ["quality", "--optim", "adamw_torch", "--lr", "3e-3", "--dtype", "bfloat16", "--steps", "2"]
    words += ["--adapter", adapter, "--activation-memory", memory, "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    quality.main()
    name = f"adamw_torch-bf16-{adapter}-{memory.replace(':', '-')}-steps=2"
    (path,) = (tmp_path / "sotu-lm").glob("*.json")
    assert path.name == f"{name}@0.003-0.json"
    found = json.loads(path.read_text())
    assert found["adapter"] == {"adapter": adapter, "memory": memory, "checkpointing": False, "dropout": 0.0}
    assert found["parameters"] == 2 * RANK * (4 * H + 2 * (H + KV) + 3 * (H + MLP))
    assert len(found["curve"]) == 2 and found["activation_bytes"] > 0 and found["before"] != found["after"]


def test_options_of_adapters_without_adapters_are_refused(monkeypatch, capsys):
    for words in (["--activation-memory", EXACT], ["--gradient-checkpointing"]):
        monkeypatch.setattr(sys, "argv", ["quality", "--plan", "adamw_torch", *words])
        with pytest.raises(SystemExit):
            quality.main()
        assert "--adapter" in capsys.readouterr().err


def test_the_commands_name_the_runs_that_the_page_looks_for():
    assert len({lora.strategy(way) for way in lora.MATRIX}) == len(lora.MATRIX)
    for way in lora.MATRIX:
        words = shlex.split(lora.command(way))
        given = dict(zip(words[3::2], words[4::2], strict=True))
        read = argparse.Namespace(
            adapter=given["--adapter"],
            activation_memory=given["--activation-memory"],
            gradient_checkpointing=False,
            lora_dropout=0.0,
        )
        assert quality.way_of(read) == way
        assert given["--results"] == "benchmarks/results/lora"
    assert quality.rates("adamw_torch", sotu_lm, "lora") == (1e-4, 3e-4, 1e-3)
    assert quality.rates("adamw_torch", sotu_lm) == sotu_lm.LEARNING_RATES


def run(folder, way, after, seed=0, **more):
    strategy = lora.strategy(way)
    content = {"strategy": strategy, "optim": "adamw_torch", "figure": "held-out loss", "lr": 3e-4, "seed": seed}
    content |= {"dtype": "bfloat16", "before": 3.5, "after": after, "batches_sha256": str(seed), "steps": 60}
    content |= {"training_arguments": {"max_steps": 60}, "activation_bytes": 2**20, "step_seconds": 1.0, **more}
    common.write_json(folder / "sotu-lm" / f"{strategy}@0.0003-{seed}.json", content)


def cells(page, first):
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_page_names_what_is_missing_and_compares_with_the_default(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from benchmarks.lora_page import page

    empty = page(tmp_path / "none")
    assert "Missing: smollm2-135m, llama-3-8b-block." in empty
    assert "Missing: smollm2-135m-blocks, float32; smollm2-135m-blocks, bfloat16;" in empty
    assert "yes" not in empty and set(cells(empty, "lora-exact")[1:]) == {"missing"}

    def block(name, way, nbytes):
        content = {"block_bytes": nbytes, "tokens": 10, "model_bytes": None, "peak": None}
        common.write_json(lora_activations.path_of(tmp_path / "activations", name, way), content)

    for memory, nbytes in ((PEFT, 1000), (NARROW, 600), (EXACT, 500), (VELORA, 400), ("compressed:0.25", 401)):
        block("llama-3-8b-block", Way("lora", memory), nbytes)
    for seed in (0, 1):
        run(tmp_path, Way("lora", PEFT), 3.25, seed)
        run(tmp_path, Way("lora", EXACT), 3.5, seed)
    text = page(tmp_path)
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    reached = {row[1]: (row[-3], row[-2]) for row in rows if row[2] == "lora, llama-3-8b-block"}
    assert reached["exact, bytes of PEFT's default"] == ("0.500", "yes")
    assert reached["exact, bytes of PEFT with bf16 adapters"] == ("0.833", "no")
    assert reached["compressed:0.25, bytes of VeLoRA"] == ("1.002", "no")
    assert reached["compressed:0.25:none, bytes of VeLoRA"] == ("missing", "missing")
    quality_part = text[text.index("## Loss") :]
    assert cells(quality_part, "lora-exact")[3:8] == ["2", "3.5000", "3.5000", "0.0000", "+0.2500"]
    assert cells(quality_part, "qlora-exact")[1] == "missing"
    assert (tmp_path / "lora.png").read_bytes().startswith(b"\x89PNG")


def test_runs_on_other_batches_are_not_compared(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from benchmarks.lora_page import page

    run(tmp_path, Way("lora", PEFT), 3.25)
    run(tmp_path, Way("lora", EXACT), 3.25, batches_sha256="others")
    with pytest.raises(ValueError, match="saw different batches"):
        page(tmp_path)
