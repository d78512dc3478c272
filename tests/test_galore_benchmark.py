"""The benchmark of GaLore: peers are trained as documented, their projectors are counted, the matrix is what is run."""

import json
import shlex

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from benchmarks import common, galore, galore_step, peers
from hf_memopt.options import GaLoreOptions, GaLoreTacoOptions
from hf_memopt.parsing import parse_options


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=90, num_key_value_heads=1, tie_word_embeddings=False, **sizes))


def arguments(optim: str, optim_args: str, of: torch.nn.Module) -> dict:
    return peers.optimizer_arguments(optim, optim_args, lr=0.5, beta1=0.8, model=of)


@pytest.mark.parametrize("optim", [peers.GALORE_TORCH, peers.APOLLO_TORCH])
def test_a_peer_projects_every_linear_layer_but_the_head(optim):
    pytest.importorskip(optim.replace("-", "_"), reason="a peer, not needed to train")
    of = model()
    chosen = arguments(optim, "rank=0.25,update_proj_gap=7,scale=0.5", of)
    cls, kwargs = chosen["trainer"]["optimizer_cls_and_kwargs"]
    optimizer = cls(**kwargs)
    names = {id(p): name for name, p in of.named_parameters()}
    projected = {names[id(p)]: g["rank"] for g in optimizer.param_groups if "rank" in g for p in g["params"]}
    linear = {name for name in names.values() if "proj" in name}
    # k and v have 32 rows, all others 64 or more
    assert projected == {name: 8 if "k_proj" in name or "v_proj" in name else 16 for name in linear}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.999), 1e-8, 0.0)
        if "rank" in group:
            assert (group["update_proj_gap"], group["scale"], group["proj_type"]) == (7, 0.5, "std")


def test_a_misspelt_option_of_a_peer_is_refused():
    with pytest.raises(ValueError, match="galore-torch has no option 'gap': it has rank"):
        arguments(peers.GALORE_TORCH, "gap=7", model())


def test_transformers_low_rank_names_get_the_same_layers_as_a_regular_expression(tmp_path):
    of = model()
    chosen = arguments("apollo_adamw", "rank=16", of)
    assert chosen["optim_args"] == "rank=16"
    from transformers.trainer_utils import check_target_module_exists

    target = TrainingArguments(str(tmp_path), optim_target_modules=chosen["optim_target_modules"]).optim_target_modules
    hit = {name for name, _ in of.named_modules() if name and check_target_module_exists(target, name)}
    assert hit == set(peers.linear_layers(of)) and "lm_head" not in hit


def test_what_is_kept_in_a_projector_is_counted():
    galore_torch = pytest.importorskip("galore_torch", reason="a peer, not needed to train")
    weight = torch.nn.Parameter(torch.randn(96, 64))
    group = {"params": [weight], "rank": 16, "update_proj_gap": 7, "scale": 1.0, "proj_type": "std"}
    optimizer = galore_torch.GaLoreAdamW([group], no_deprecation_warning=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    moments = 2 * 4 * 96 * 16
    (found,) = common.hyperparameters(optimizer)
    # the projector is a view of all 64 singular vectors
    assert found["state_bytes"] == common.state_bytes(optimizer) == moments + 4 * 64 * 64
    assert galore_step.view_bytes(dict(optimizer.state)) == moments + 4 * 64 * 16


@pytest.mark.parametrize("task", list(galore.TASKS))
def test_the_matrix_has_no_run_twice_and_options_that_exist(task):
    runs = galore.matrix(task)
    strategies = [run.strategy for run in runs]
    assert len(set(strategies)) == len(strategies)
    for run in runs:
        if run.optim in (galore.OURS, galore.TERNARY):
            parse_options(GaLoreOptions if run.optim == galore.OURS else GaLoreTacoOptions, run.optim_args)
        if run.ablates:
            mine, other = (dict(part.split("=") for part in r.optim_args.split(",")) for r in (run, run.ablates))
            assert run.ablates.strategy in strategies and len(set(mine.items()) - set(other.items())) == 1


def test_an_ablation_is_run_at_the_best_rate_of_what_it_ablates(tmp_path):
    run = next(run for run in galore.matrix("llama-pretrain") if run.ablates)
    assert "--lr" not in shlex.split(galore.command(run, "llama-pretrain", tmp_path))
    for lr, after in ((1e-3, 4.0), (2e-3, 3.0)):
        record(tmp_path, run.ablates, lr, after)
    words = shlex.split(galore.command(run, "llama-pretrain", tmp_path))
    assert words[words.index("--lr") + 1] == "0.002"
    assert words[words.index("--optim-args") + 1] == run.optim_args


def record(folder, run: galore.Run, lr: float, after: float, seed: int = 0, steps: int = 400) -> None:
    group = {"parameters": 1000, "state_bytes": 250, "rank": 0.25, "treatment": "projected"}
    rest = {"parameters": 500, "state_bytes": 4000}
    content = {
        "strategy": run.strategy,
        "optim": run.optim,
        "figure": "held-out loss",
        "lr": lr,
        "seed": seed,
        "dtype": "float32",
        "after": after,
        "batches_sha256": str(seed),
        "steps": steps,
        "training_arguments": {"max_steps": steps},
        "param_groups": [rest]
        if run.optim == galore.BASELINE
        else [group, {**rest, "rank": 0.25, "treatment": "dense"}],
        "state_bytes": 4250,
        "step_seconds": 0.25,
        "optimizer_seconds": 0.012,
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "a processor", "threads": 1},
    }
    common.write_json(folder / "llama-pretrain" / f"{run.strategy}@{lr:g}-{seed}.json", content)


def test_the_page_has_a_row_a_strategy_and_the_bits_of_what_is_projected(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    baseline, peer, _, ours, *_ = galore.matrix("llama-pretrain")
    for seed in (0, 1):
        record(tmp_path / "quality", baseline, 2e-3, 4.25 + seed / 100, seed)
        record(tmp_path / "galore", ours, 2e-3, 4.5 + seed / 50, seed)
    record(tmp_path / "galore", peer, 2e-3, 4.75)
    page = galore.page(tmp_path / "galore", tmp_path / "quality")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    rows = [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]]
    assert [row["optim"] for row in rows] == [galore.BASELINE, galore.OURS, peers.GALORE_TORCH]
    assert [row["bits of the projected"] for row in rows] == ["", "2.00", "2.00"]
    assert rows[1]["after, mean"] == "4.5100" and rows[1]["spread"] == "0.0200"
    assert rows[1]["against adamw_torch, same batches"].startswith("+0.2550")
    assert (tmp_path / "galore" / "llama-pretrain.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_measured_with_every_refresh(tmp_path):
    for name in ("galore_torch", "apollo_torch"):
        pytest.importorskip(name, reason="a peer, not needed to train")
    names = [galore_step.PEER, "fp32, subspace", "ternary, select"]
    found = galore_step.measure("float32", 16, 2, names, width=64, inner=96)
    common.write_json(galore_step.path_of(tmp_path, "float32", 16), found)
    (read,) = galore_step.load(tmp_path)
    assert read == json.loads(json.dumps(found)) and list(found["optimizers"]) == names
    for name, r in found["optimizers"].items():
        assert len(r["normal_seconds"]) == 2
        assert len(r["refresh_seconds"]) == (0 if name == galore_step.PEER else 7)
        assert r["worst_seconds"] >= max(r["first_seconds"])
        assert r["seconds_a_step"] == r["normal"]["median"] + r["seconds_of_all_refreshes"] / galore_step.GAP
    assert found["optimizers"]["ternary, select"]["state_bytes"] < found["optimizers"]["fp32, subspace"]["state_bytes"]
    assert "| ternary, select" in galore_step.section(read)
    with pytest.raises(ValueError, match="leave it in"):
        galore_step.measure("float32", 16, 2, names[1:], width=64, inner=96)
