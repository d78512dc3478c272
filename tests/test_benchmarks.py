"""What the benchmarks record is what was there: bytes by storage, the same batches for all, tables from the files."""

import json
import re

import pytest
import torch

from benchmarks import common, demo, quality, sotu_lm, tables
from tests.assets import needs_assets


def result(optim: str, lr: float = 1e-4, seed: int = 0, after: float = 3.2, **more) -> dict:
    return {
        "strategy": optim,
        "optim": optim,
        "task": "sotu-lm",
        "figure": "held-out loss",
        "lr": lr,
        "seed": seed,
        "dtype": "float32",
        "before": 3.5,
        "after": after,
        "curve": [3.5, 3.4, 3.3],
        "steps": 3,
        "training_arguments": {"max_steps": 3},
        "parameters": 1000,
        "weight_bytes": 4_000_000,
        "gradient_bytes": 4_000_000,
        "state_bytes": 400_000,
        "bits_per_parameter": 3.3,
        "peak_memory_bytes": 1_234_000_000,
        "step_seconds": 2.0,
        "optimizer_seconds": 0.1,
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "machine": {"cpu": "a processor", "threads": 2},
        **more,
    }


def test_storage_bytes_counts_each_storage_once_and_whole():
    whole = torch.zeros(1000)
    assert common.storage_bytes({"a": whole, "b": [whole[:10], (whole.view(10, 100),)]}) == 4000
    assert common.storage_bytes({"view": whole[:10]}) == 4000
    assert common.storage_bytes([torch.zeros(3, dtype=torch.bfloat16), 7, None, "text", torch.zeros(0)]) == 6


def test_state_bytes_of_adamw():
    weight = torch.nn.Parameter(torch.randn(50, 20))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert common.state_bytes(optimizer) == 2 * 4 * 1000 + 4


def test_a_result_is_written_whole(tmp_path):
    path = tmp_path / "folder" / "x.json"
    common.write_json(path, {"b": 1, "a": [2.5]})
    assert json.loads(path.read_text()) == {"a": [2.5], "b": 1}
    with pytest.raises(TypeError):
        common.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [2.5], "b": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_peak_memory_sees_what_was_used_since_the_reset():
    common.reset_peak_memory()
    before = common.peak_memory_bytes()
    block = torch.ones(40_000_000)
    assert common.peak_memory_bytes() - before > 100e6
    del block


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("taco_adamw", "float32", 0.9, "", 0), "taco_adamw"),
        (("taco_adamw", "bfloat16", 0.9, "dense_embeddings=true", 0), "taco_adamw-bf16-dense_embeddings=true"),
        (("adamw_torch", "float32", 0.8, "", 0), "adamw_torch-beta1=0.8"),
        (("adamw_torch", "float32", 0.9, "", 5), "adamw_torch-steps=5"),
    ],
)
def test_a_strategy_carries_what_differs_in_its_name(given, name):
    assert quality.strategy_name(*given) == name


def test_only_strategies_of_the_package_get_the_seed():
    assert quality.with_seed("taco_adamw", "", 2) == "seed=2"
    assert quality.with_seed("taco_adamw", "dense_embeddings=true", 2) == "dense_embeddings=true,seed=2"
    assert quality.with_seed("taco_adamw", "seed=5", 2) == "seed=5"
    assert quality.with_seed("adamw_torch", "", 2) == ""


def test_the_table_takes_the_best_rate_at_seed_0_and_all_its_seeds():
    runs = [
        result("a", 1e-4, 0, 3.20),
        result("a", 1e-4, 1, 3.30),
        result("a", 3e-4, 0, 3.25),
        result("a", 3e-4, 1, 3.0),
    ]
    (row,) = tables.summary(runs)
    assert (row["best rate"], row["seeds"], row["after, mean"], row["spread"]) == ("0.0001", "2", "3.2500", "0.1000")


def test_a_strategy_is_compared_with_adamw_of_its_dtype_seed_by_seed():
    runs = [result("adamw_torch", seed=s, after=a) for s, a in enumerate((3.2, 3.3))]
    runs += [result("adamw_torch-bf16", after=9.0, dtype="bfloat16"), result("adamw_torch-beta1=0.8", after=3.1)]
    runs += [result("taco_adamw", seed=s, after=a) for s, a in enumerate((3.21, 3.29, 5.0))]
    cells = {row["strategy"]: row["against adamw_torch, same batches"] for row in tables.summary(runs)}
    assert cells["taco_adamw"] == "+0.0000 (-0.0100 to +0.0100)"
    assert cells["adamw_torch-beta1=0.8"].startswith("-0.1000")
    assert cells["adamw_torch"] == cells["adamw_torch-bf16"] == ""


def test_the_readme_block_is_replaced_and_nothing_else():
    text = "a\n<!-- demo: begin (generated) -->\nold\n<!-- demo: end -->\nb\n"
    assert tables.replace_block(text, "demo", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="no generated block 'other'"):
        tables.replace_block(text, "other", "new")


def test_the_demo_ends_with_a_table_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    results = [result("taco_adamw"), result("adamw_torch", state_bytes=8_000_000, bits_per_parameter=64.0)]
    text = demo.table(demo.rows(results))
    assert len({len(line) for line in text.splitlines()}) == 1
    assert re.search(r"\| taco_adamw .* 0\.4 MB .* 3\.30 .* 1,234 MB .* 2\.00 .* 5\.0% \|", text)
    demo.plot(results, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_the_demo_is_a_mean_of_what_came_before():
    assert demo.running_mean([4.0, 2.0, 0.0, 2.0], width=2) == [4.0, 3.0, 1.0, 1.0]
    assert demo.running_mean([], width=2) == []


def test_the_quality_page_has_a_row_a_strategy_and_leaves_shortened_runs_out(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    monkeypatch.setattr(tables, "QUALITY", tmp_path)
    runs = [result("taco_adamw"), result("adamw_torch", bits_per_parameter=64.0), result("taco_adamw-steps=3", 2e-4)]
    for number, run in enumerate(runs):
        common.write_json(tmp_path / "sotu-lm" / f"{number}.json", run)
    page = tables.quality_page()
    assert re.findall(r"^\| ([\w=-]+) +\| ", page, re.MULTILINE) == ["strategy", "adamw_torch", "taco_adamw"]
    assert (tmp_path / "sotu-lm.png").read_bytes().startswith(b"\x89PNG")


@needs_assets
def test_sotu_lm_holds_whole_texts_out_and_draws_by_seed_alone():
    train, held_out = sotu_lm.blocks()
    assert train.shape[1] == sotu_lm.BLOCK_TOKENS and held_out.shape == (sotu_lm.HELD_OUT_BLOCKS, sotu_lm.BLOCK_TOKENS)
    seen = {tuple(block) for block in train.tolist()}
    assert not any(tuple(block) in seen for block in held_out.tolist())

    def drawn(seed):
        return torch.stack([row["input_ids"] for row in sotu_lm.training_blocks(seed)])

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(0)) and not torch.equal(first, drawn(1))
    assert len(first) == sotu_lm.STEPS * sotu_lm.BATCH_BLOCKS
    assert len({tuple(block) for block in first.tolist()}) == len(first)
