"""What the benchmarks record is what was there: bytes by storage, the same batches for all, tables from the files."""

import importlib
import json
import math
import re

import pytest
import torch

from benchmarks import common, demo, embedding_lr, llama_pretrain, quality, reviews_cls, sotu_lm, tables
from hf_memopt.optim.taco_adamw import TacoAdamW
from tests.assets import needs_assets


def result(strategy: str, lr: float = 1e-4, seed: int = 0, after: float = 3.2, **more) -> dict:
    return {
        "strategy": strategy,
        "optim": strategy.partition("-")[0],
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
        "step_seconds": 2.0,
        "optimizer_seconds": 0.1,
        "peak_memory_bytes": 900_000_000,
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
        (("sgd-momentum", "float32", 0.9, "", 0, 4.0), "sgd-momentum-embedding_lr_scale=4"),
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


def test_a_best_rate_at_the_edge_of_the_grid_is_marked():
    afters = {1e-4: 3.2, 3e-4: 3.1, 1e-3: 3.3}
    inside = [result("a", lr, after=after) for lr, after in afters.items()]
    highest = [result("b", lr, after=-lr) for lr in afters]
    lowest = [result("c", lr, after=lr) for lr in afters]
    cells = {row["strategy"]: row["best rate"] for row in tables.summary(inside + highest + lowest)}
    assert cells == {"a": "0.0003", "b": "0.001 (highest tried)", "c": "0.0001 (lowest tried)"}


AGAINST = "against the best adamw_torch, same batches"


def test_a_strategy_is_compared_with_the_best_adamw_of_its_kind_seed_by_seed():
    runs = [result("adamw_torch", seed=s, after=a) for s, a in enumerate((3.2, 3.3))]
    runs += [result("adamw_torch-beta1=0.8", seed=s, after=a) for s, a in enumerate((3.1, 3.25))]
    runs += [result("adamw_torch-beta1=0.7", after=2.0)]  # one seed only
    runs += [result("adamw_torch-bf16", after=9.0, dtype="bfloat16")]
    runs += [result("adamw_torch-embedding_lr_scale=4", after=3.0, embedding_lr_scale=4.0)]
    runs += [result("taco_adamw", seed=s, after=a) for s, a in enumerate((3.11, 3.24, 5.0))]
    runs += [result("taco_adamw-embedding_lr_scale=4", after=3.05, embedding_lr_scale=4.0)]
    runs += [result("taco_adamw-fp16", dtype="float16")]
    cells = {row["strategy"]: row[AGAINST] for row in tables.summary(runs)}
    assert cells["taco_adamw"] == "+0.0000 (-0.0100 to +0.0100)"
    assert cells["adamw_torch"] == "+0.0750 (+0.0500 to +0.1000)"
    assert cells["taco_adamw-embedding_lr_scale=4"].startswith("+0.0500")
    assert cells["adamw_torch-beta1=0.8"] == cells["adamw_torch-bf16"] == "(compared with)"
    assert cells["taco_adamw-fp16"] == ""


def test_runs_on_different_batches_are_not_compared():
    runs = [result("adamw_torch", batches_sha256="a"), result("taco_adamw", batches_sha256="b")]
    with pytest.raises(ValueError, match="taco_adamw and adamw_torch saw different batches at seed 0"):
        tables.summary(runs)


def test_a_further_figure_has_its_columns_and_decides_nothing():
    accuracies = {1e-4: (0.70, 0.72), 3e-4: (0.90,)}
    runs = [
        result("a", lr, seed, after, more={"accuracy": {"before": 0.5, "after": accuracies[lr][seed]}})
        for lr, seed, after in ((1e-4, 0, 0.60), (1e-4, 1, 0.61), (3e-4, 0, 0.62))
    ]
    (row,) = tables.summary(runs)
    shown = [row[f"accuracy {what}"] for what in ("before", "after, mean", "spread")]
    assert (row["best rate"], shown) == ("0.0001", ["0.500", "0.710", "0.020"])
    assert (row["peak"], row["state"], row["of which optimizer"]) == ("900.0 MB", "0.4 MB", "0.100")


def test_every_task_has_the_same_names_and_every_grid_three_rates():
    for name, module in quality.TASKS.items():
        task = importlib.import_module(module)
        assert task.NAME == name and task.FIGURE and task.STEPS == task.training_arguments()["max_steps"]
        assert task.training_arguments(10)["max_steps"] == 10
        for optim in ("adamw_torch", *quality.GRIDS):
            rates = quality.rates(optim, task)
            assert len(rates) == 3 and list(rates) == sorted(rates)
    assert set(quality.TASKS) >= {task for grids in quality.GRIDS.values() for task in grids}


def test_a_task_gives_one_figure_or_several():
    assert quality.measured(sotu_lm, 3.2) == (3.2, {})
    assert quality.measured(reviews_cls, {"accuracy": 0.7, "held-out loss": 0.6}) == (0.6, {"accuracy": 0.7})


def test_a_beta1_that_the_optimizer_does_not_have_is_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    quality.refuse_unused_beta1("adamw_torch", 0.8, torch.optim.AdamW([weight], betas=(0.8, 0.999)))
    with pytest.raises(ValueError, match="sgd-momentum does not take --beta1 0.8"):
        quality.refuse_unused_beta1("sgd-momentum", 0.8, torch.optim.SGD([weight], lr=1.0, momentum=0.9))


def named_model() -> tuple[torch.nn.Module, list[tuple[str, torch.nn.Parameter]]]:
    model = llama_pretrain.load_model(torch.float32)
    return model, list(model.named_parameters())


def torchao_4bit(named):
    return pytest.importorskip("torchao.optim").AdamW4bit([p for _, p in named], lr=0.25)


@pytest.mark.parametrize(
    "build",
    [
        lambda named: torch.optim.AdamW(named, lr=0.25, weight_decay=0.5),
        lambda named: TacoAdamW([{"params": named[:9]}, {"params": named[9:]}], lr=0.25, weight_decay=0.5),
        torchao_4bit,
    ],
    ids=["named", "two groups", "rate in a tensor"],
)
def test_embedding_and_head_get_their_rate_and_every_parameter_is_held_once(build):
    model, named = named_model()
    optimizer = build(named)
    before = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    settings = {i: {k: v for k, v in g.items() if k not in ("params", "param_names", "lr")} for i, g in before.items()}
    names = {id(p): name for name, p in named}
    embedding_lr.scale_groups(optimizer, embedding_lr.embedding_and_head(model), 4.0)
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(id(p) for p, _ in held) == sorted(map(id, model.parameters()))
    for p, group in held:
        outside = names[id(p)] in ("model.embed_tokens.weight", "lm_head.weight")
        assert float(group["lr"]) == (1.0 if outside else 0.25)
        assert {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")} == settings[id(p)]
    for group in optimizer.param_groups:
        if "param_names" in group:
            assert group["param_names"] == [names[id(p)] for p in group["params"]]


def test_a_group_of_nothing_but_embeddings_stays_one_group_and_none_is_refused():
    model, named = named_model()
    chosen = embedding_lr.embedding_and_head(model)
    inside = [p for _, p in named if id(p) in chosen]
    outside = [p for _, p in named if id(p) not in chosen]
    optimizer = torch.optim.SGD([{"params": inside}, {"params": outside}], lr=0.5)
    embedding_lr.scale_groups(optimizer, chosen, 4.0)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.5]
    with pytest.raises(ValueError, match="no embedding and no output head"):
        embedding_lr.scale_groups(torch.optim.SGD(outside, lr=0.5), chosen, 4.0)


def test_what_a_run_was_trained_with_is_recorded():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("w", weight)], lr=torch.tensor(0.5), momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    (group,) = common.hyperparameters(optimizer)
    assert (group["parameters"], group["lr"], group["momentum"], group["nesterov"]) == (3, 0.5, 0.9, False)
    json.dumps(group)


def test_the_accuracy_and_the_loss_of_the_reviews():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.5, 0.0]])
    found = reviews_cls.figures(logits.bfloat16(), torch.tensor([0, 1, 0, 0]))
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(-1)), math.log1p(math.exp(3)), math.log1p(math.exp(-0.5))]
    assert found["accuracy"] == 0.75
    assert found[reviews_cls.FIGURE] == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_two_titles_of_a_film_are_one_film():
    film = reviews_cls.one_film([["c"], ["b", "c"], ["d"], ["a", "b"], ["e", "d"]])
    assert film["a"] == film["b"] == film["c"] != film["d"] == film["e"]


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
    assert re.search(r"\| taco_adamw .* 0\.4 MB .* 3\.30 .* 900 MB .* 2\.00 .* 5\.0% \|", text)
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


@needs_assets
def test_reviews_cls_is_split_by_film_and_ordered_by_seed_alone():
    found = reviews_cls.snippets()
    train, held_out = reviews_cls.split(found)
    assert (len(train), len(held_out)) == (reviews_cls.TRAINING, reviews_cls.HELD_OUT)
    assert not {film for *_, film in train} & {film for *_, film in held_out}
    every = [text.lower() for text, *_ in found]
    assert len(set(every)) == len(every) and {label for _, label, _ in held_out} == {0, 1}

    def drawn(seed):
        return [tuple(row["input_ids"].tolist()) for row in reviews_cls.training_blocks(seed)]

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert first == drawn(0) != drawn(1) and sorted(first) == sorted(drawn(1))
    batch = reviews_cls.collate(reviews_cls.training_blocks(0, 1))
    assert batch["input_ids"].shape == batch["attention_mask"].shape and len(batch["labels"]) == reviews_cls.BATCH
    assert torch.equal(batch["input_ids"] != reviews_cls.tokenizer().pad_token_id, batch["attention_mask"].bool())


@needs_assets
def test_the_head_of_reviews_cls_depends_on_the_seed_alone():
    heads = []
    for seed, around in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(around)
        heads.append(reviews_cls.load_model(torch.float32, seed).classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


@needs_assets
def test_llama_pretrain_holds_whole_texts_out_and_draws_by_seed_alone(tmp_path, monkeypatch):
    texts, held_out_texts = (part[:2] for part in sotu_lm.texts())
    monkeypatch.setattr(llama_pretrain, "texts", lambda: (texts, held_out_texts))
    monkeypatch.setattr(llama_pretrain, "demo_dir", lambda: tmp_path)
    monkeypatch.setattr(llama_pretrain, "HELD_OUT_BLOCKS", 5)
    llama_pretrain.blocks.cache_clear()
    try:
        train, held_out = llama_pretrain.blocks()
        assert train.shape[1] == llama_pretrain.BLOCK_TOKENS and held_out.shape == (5, llama_pretrain.BLOCK_TOKENS)
        assert train.max() < llama_pretrain.VOCABULARY
        bpe = llama_pretrain.make_tokenizer(texts)
        whole = [bpe.decode(bpe.encode(text).ids) for text in texts]
        assert all(bpe.decode(block.tolist()) in whole[0] for block in train[:3])

        llama_pretrain.blocks.cache_clear()
        monkeypatch.setattr(llama_pretrain, "make_tokenizer", None)  # now it must come from the cache
        assert all(map(torch.equal, llama_pretrain.blocks(), (train, held_out)))

        def drawn(seed):
            return torch.stack([row["input_ids"] for row in llama_pretrain.training_blocks(seed, 1)])

        torch.manual_seed(1)
        first = drawn(0)
        torch.manual_seed(2)
        assert torch.equal(first, drawn(0)) and not torch.equal(first, drawn(1))
    finally:
        llama_pretrain.blocks.cache_clear()


def test_the_weights_of_llama_pretrain_depend_on_the_seed_alone():
    weights = []
    for seed, around in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(around)
        weights.append(llama_pretrain.load_model(torch.float32, seed).lm_head.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
