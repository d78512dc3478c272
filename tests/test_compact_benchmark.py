"""The benchmark of CompAct: bytes by storage and by formula, steps that go on where they stopped, a page without
invented figures."""

import json
import shlex

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import common, compact, compact_activations, compact_memory, compact_step, fits
from benchmarks.compact_activations import BOTH, CHECKPOINTING, COMPACT, PLAIN, RECOMPUTE, WAYS, Way
from benchmarks.held_bytes import held_bytes
from hf_memopt import compress_activations
from hf_memopt.options import CompActOptions
from hf_memopt.parsing import parse_options

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 90,
}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
TOKENS = 24
LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize("way", [PLAIN, CHECKPOINTING, RECOMPUTE, *COMPACT, *BOTH[::5], WAYS[-1]], ids=lambda w: w.name)
def test_a_block_keeps_what_the_formula_says(way):
    found = compact_activations.measure("tiny", way, TOKENS, SIZES)
    assert found["block_bytes"] == TOKENS * compact_activations.per_token(SIZES, way)
    assert found["model_bytes"] > SIZES["num_hidden_layers"] * found["block_bytes"]


def test_the_formula_gives_the_published_numbers():
    """20 H + 4 K + 8 I + 4 a of Llama-3-8B is 200.8 kB a token; the roots of two norms are counted beside it."""
    roots = 8
    assert compact_activations.per_token(LLAMA_3_8B, PLAIN) == 200_832 + roots
    assert compact_activations.per_token(LLAMA_3_8B, RECOMPUTE) == 94_208 + 4 * 32
    shared = [compact_activations.per_token(LLAMA_3_8B, Way(rank=rank)) / 200_840 - 1 for rank in (0.5, 0.25, 0.125)]
    assert [round(100 * change) for change in shared] == [-11, -17, -20]


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


@pytest.mark.parametrize(
    "way", [PLAIN, RECOMPUTE, Way(rank=0.25, projection="gaussian"), Way(True)], ids=lambda w: w.name
)
def test_held_bytes_are_those_of_saved_tensors_and_of_what_closures_hold(way):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=TOKENS, **SIZES)).to(torch.bfloat16).train()
    if way.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if way.config() is not None:
        compress_activations(model, way.config())
    ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))

    def forward():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    held, kinds = held_bytes(model, forward, largest=100)
    saved = saved_by_hooks(model, forward)
    assert sum(kind["nbytes"] for kind in kinds) == held
    # the rotary embedding: a checkpointed block is called with it, and its closure holds it
    rotary = 2 * 2 * TOKENS * SIZES["hidden_size"] // SIZES["num_attention_heads"] if way.checkpointing else 0
    # the batch is among the saved tensors, and forward has not made it
    assert held - rotary <= saved <= held - rotary + 2 * ids.nbytes
    assert compact_activations.measure("tiny", way, TOKENS, SIZES)["model_bytes"] == held


def test_without_a_graph_nothing_is_counted():
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="no graph"):
        held_bytes(model, lambda: model(torch.ones(2, 4)))


def test_a_configuration_has_one_file_and_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(compact_activations, "MODELS", {"tiny": SIZES})
    monkeypatch.setattr(compact_activations, "WAYS", [PLAIN, RECOMPUTE])
    compact_activations.run(tmp_path)
    found = compact_activations.load(tmp_path)
    assert list(found) == ["tiny"] and list(found["tiny"]) == ["plain", "recompute"]
    monkeypatch.setattr(compact_activations, "measure", None)
    compact_activations.run(tmp_path)


def test_peaks_are_simulated_and_recomputation_lowers_them(tmp_path, monkeypatch):
    trainings = [
        compact_memory.Training("taco_adamw_layerwise", False),
        compact_memory.Training("taco_adamw_layerwise", False, recompute=True),
        compact_memory.Training("compact_adamw_layerwise", False),
    ]
    monkeypatch.setattr(compact_memory, "TRAININGS", trainings)
    monkeypatch.setitem(fits.SIZES, "tiny", SIZES)
    compact_memory.run(tmp_path, size="tiny", tokens=64)
    plain, recomputed, compressed = compact_memory.load(tmp_path).values()
    held = [r["memory"]["after"]["forward"]["components"]["activations"] for r in (plain, recomputed, compressed)]
    assert held[0] > held[1] and compressed["memory"]["phases"]["step"]["components"]["gradients"] == 0
    assert compressed["training"] == {
        "optimizer": "compact_adamw_layerwise",
        "checkpointing": False,
        "recompute": False,
    }


SUBJECTS = {
    name: compact_step.SUBJECTS[name]
    for name in (
        compact_step.PLAIN_TORCH,
        compact_step.PLAIN_OURS,
        "checkpointing",
        "recompute",
        "compact-0.25-principal",
    )
}


def test_rounds_go_on_where_they_stopped_and_exact_ways_have_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(compact_step, "LEARNING_RATE", 0.03)  # so that the third loss shows what was trained
    path = compact_step.path_of(tmp_path, "float32")
    compact_step.measure("float32", 1, path, SUBJECTS, SIZES)
    first = json.loads(path.read_text())
    compact_step.measure("float32", 2, path, SUBJECTS, SIZES)
    (read,) = compact_step.load(tmp_path)
    configurations = read["configurations"]
    for name, found in configurations.items():
        assert len(found["seconds"]) == 2 and found["seconds"][:1] == first["configurations"][name]["seconds"]
        assert set(found["simulated_peak_bytes"]) == {"forward", "backward", "step"}
    plain, _, checkpointed, recomputed, compressed = (configurations[name]["losses"][0] for name in SUBJECTS)
    assert plain == checkpointed == recomputed != compressed
    rows = {row["configuration"]: row for row in compact_step.rows(read)}
    assert rows[compact_step.PLAIN_TORCH][f"x {compact_step.PLAIN_TORCH}"] == "1.000"


def test_the_matrix_has_every_rank_and_projection_with_options_that_exist():
    strategies = {run.strategy for run in compact.MATRIX}
    assert len(strategies) == len(compact.MATRIX) == 12
    for run in compact.MATRIX:
        options = parse_options(CompActOptions, run.optim_args)
        assert (options.rank, options.projection) == (run.rank, run.projection)
        words = shlex.split(run.command("llama-pretrain"))
        assert words[words.index("--optim-args") + 1] == run.optim_args
        assert words[words.index("--results") + 1] == "benchmarks/results/compact"


def record(folder, strategy: str, after: float, seed: int = 0, **more) -> None:
    content = {
        "strategy": strategy,
        "optim": strategy.partition("-")[0],
        "figure": "held-out loss",
        "lr": 2e-3,
        "seed": seed,
        "dtype": "float32",
        "after": after,
        "batches_sha256": str(seed),
        "steps": 400,
        "training_arguments": {"max_steps": 400},
        "state_bytes": 4_000_000,
        "step_seconds": 0.25,
        **more,
    }
    common.write_json(folder / "llama-pretrain" / f"{strategy}@0.002-{seed}.json", content)


def cells(page: str, first: str) -> list[str]:
    return next(line for line in page.splitlines() if line.startswith(f"| {first} ")).split("|")[1:-1]


def test_the_page_names_what_is_missing_and_compares_by_perplexity(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from benchmarks.compact_page import page

    empty = page(tmp_path / "none", tmp_path / "none")
    assert "Missing: smollm2-135m, llama-3.2-1b, llama-2-7b." in empty
    assert empty.count("\nMissing.\n") == 2
    folder, quality = tmp_path / "compact", tmp_path / "quality"
    for seed in (0, 1):
        record(quality, "adamw_torch-beta1=0.8", 4.25, seed)
        record(quality, "adamw_torch", 4.5, seed)
        ours = "compact_adamw-beta1=0.8-rank=0.5-projection=principal"
        record(folder, ours, 4.25 + 0.0953, seed, activation_bytes=2_000_000)
    text = page(folder, quality)
    ours = [cell.strip() for cell in cells(text, "compact_adamw-beta1=0.8-rank=0.5-projection=principal")]
    assert ours[2:8] == ["2", "4.3453", "0.0000", "+0.0953", "1.100", "+0.0953"] and "2.0 MB" in ours
    other = [cell.strip() for cell in cells(text, "compact_adamw-beta1=0.8-rank=0.25-projection=principal")]
    assert other[1] == "missing"
    half = [cell.strip() for cell in cells(text, "n/2")]
    assert half[1] == "1.100" and half[2] == "missing" and half[-1] == "1.118 (17.40 / 15.56)"
    assert (folder / "compact.png").read_bytes().startswith(b"\x89PNG")


def test_runs_on_other_batches_are_not_compared(tmp_path):
    from benchmarks.compact_page import finished, gap

    record(tmp_path / "quality", "adamw_torch", 4.25)
    record(tmp_path / "compact", "compact_adamw-rank=0.5", 4.5, batches_sha256="others")
    with pytest.raises(ValueError, match="saw different batches"):
        gap("compact_adamw-rank=0.5", finished("llama-pretrain", tmp_path / "compact", tmp_path / "quality"))
