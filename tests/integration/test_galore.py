"""GaLore under the unmodified Trainer: what users of other implementations run into, each with the right behaviour."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from tiny_llama import differences, inner, snapshot, texts, tiny_llama, trainer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_memopt import GaLoreAdamW

NAMES = ("memopt_galore_adamw", "galore_taco_adamw")
ALL_NAMES = (*NAMES, *(f"{name}_layerwise" for name in NAMES))
BOTH_WAYS = (ALL_NAMES[0], ALL_NAMES[3])  # where the moments make no difference
OPTIONS = {"rank": 16, "update_proj_gap": 3, "scale": 1.0, "refresh": "subspace", "residual": "none"}


def optim_args(**changes) -> str:
    return ",".join(f"{key}={value}" for key, value in {**OPTIONS, **changes}.items())


def galore(tmp_path, optim="memopt_galore_adamw", options=None, **changes):
    """A Trainer; ``options`` are changes of ``OPTIONS``. The layerwise names get what they demand."""
    settings = {"optim": optim, "optim_args": optim_args(**(options or {}))}
    if optim.endswith("layerwise"):
        settings["max_grad_norm"] = 0.0
    return trainer(tmp_path, **{**settings, **changes})


def history(t, key):
    return [entry[key] for entry in t.state.log_history if key in entry]


def treatments(optimizer) -> dict[str, str]:
    return {name: group["treatment"] for group in inner(optimizer).param_groups for name in group["param_names"]}


def projected(optimizer) -> set[str]:
    return {name for name, treatment in treatments(optimizer).items() if treatment == "projected"}


def state_by_name(optimizer) -> dict[str, dict]:
    return {name: optimizer.state[p] for _, name, p in optimizer.named_params() if p in optimizer.state}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=2))


# -- it trains, all of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ALL_NAMES)
def test_it_trains_and_every_trainable_tensor_moves(optim, tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    t = galore(tmp_path, optim, model=model, max_steps=12, save_strategy="no")
    t.train()
    optimizer = inner(t.optimizer)
    assert type(optimizer) is GaLoreAdamW and optimizer.update_in_backward == optim.endswith("layerwise")
    assert history(t, "loss")[-1] < history(t, "loss")[0] - 0.3
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p) != p.requires_grad, name
    assert "model.layers.1.mlp.up_proj.weight" not in treatments(optimizer)
    assert len(projected(optimizer)) == 13


def test_the_gradient_keeps_its_shape_and_numbers(tmp_path):
    """What is left in p.grad is the whole gradient: zero_grad(set_to_none=False) and a second backward work."""
    model = tiny_llama().train()
    optimizer = galore(tmp_path, model=model).create_optimizer()
    batch = {key: torch.stack([row[key] for row in texts(4)]) for key in ("input_ids", "labels")}
    for _ in range(2):
        model(**batch).loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad.shape == p.shape and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("optim", NAMES)
def test_16_bit_weights_have_moments_that_can_decay(optim, dtype, tmp_path):
    """A second moment in bf16 cannot shrink: v * 0.999 is v."""
    t = galore(tmp_path, optim, dtype=dtype, max_steps=10, save_strategy="no")
    t.train()
    assert all(p.dtype == dtype for p in t.model.parameters())
    assert history(t, "loss")[-1] < history(t, "loss")[0] - 0.2
    state = state_by_name(inner(t.optimizer))["model.layers.0.mlp.up_proj.weight"]
    kinds = {key: value.dtype for key, value in state.items() if torch.is_tensor(value) and key.startswith("exp_avg")}
    if optim == "memopt_galore_adamw":
        assert kinds == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    else:
        assert kinds["exp_avg.codes"] == torch.uint8 and kinds["exp_avg_sq.row"] == torch.float32


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "dtype"),
    [*((name, torch.bfloat16) for name in ALL_NAMES), (NAMES[0], torch.float32)],
    ids=str,
)
def test_resume_is_bit_equal(optim, dtype, tmp_path):
    """Six steps with refreshes before, at and after the checkpoint."""
    straight = galore(tmp_path, optim, dtype=dtype, options={"residual": "fira"})
    straight.train()
    refreshes = {state["refreshes"] for state in state_by_name(inner(straight.optimizer)).values() if "side" in state}
    assert max(refreshes) > 1
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert any("projector.codes" in state for state in saved["state"].values())
    again = galore(tmp_path, optim, dtype=dtype, options={"residual": "fira"})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differences(snapshot(straight), snapshot(again)) == []
    assert history(straight, "loss") == history(again, "loss")


@pytest.mark.parametrize("refresh", ["select", "random", "svd"])
def test_resume_with_the_other_ways_to_a_subspace(refresh, tmp_path):
    options = {"refresh": refresh, "residual": "sign", "adaptive": "true"}
    straight = galore(tmp_path, "galore_taco_adamw", options)
    straight.train()
    again = galore(tmp_path, "galore_taco_adamw", options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert differences(snapshot(straight), snapshot(again)) == []


# -- what the training arguments ask for -------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", BOTH_WAYS)
def test_the_learning_rate_is_adamws(optim, tmp_path):
    """Warm-up and cosine, each step's rate as logged and as every group has it at the end."""
    schedule = {"warmup_steps": 4, "max_steps": 10, "lr_scheduler_type": "cosine", "save_strategy": "no"}
    ours = galore(tmp_path, optim, **schedule)
    theirs = trainer(tmp_path, optim="adamw_torch", **schedule)
    ours.train()
    theirs.train()
    assert history(ours, "learning_rate") == history(theirs, "learning_rate")
    assert len(set(history(ours, "learning_rate"))) > 6
    assert {g["lr"] for g in inner(ours.optimizer).param_groups} == {
        g["lr"] for g in inner(theirs.optimizer).param_groups
    }


@pytest.mark.parametrize("optim", BOTH_WAYS)
def test_weight_decay_betas_and_eps_reach_every_group(optim, tmp_path):
    changes = {"weight_decay": 0.3, "learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    ours = galore(tmp_path, optim, **changes)
    theirs = trainer(tmp_path, optim="adamw_torch", **changes)

    def by_name(t) -> dict[str, tuple]:
        names = {id(p): name for name, p in t.model.named_parameters()}
        groups = t.create_optimizer().param_groups
        return {
            names[id(p)]: (group["weight_decay"], group["lr"], group["betas"], group["eps"])
            for group in groups
            for p in group["params"]
        }

    mine = by_name(ours)
    assert mine == by_name(theirs)
    assert {decay for decay, *_ in mine.values()} == {0.0, 0.3}


def test_decay_is_of_the_weights_before_the_update(tmp_path):
    """W (1 - lr wd) - lr update: the run with decay differs from the one without by lr wd W, to fp32 rounding."""
    lr, decay, results = 1e-2, 0.5, []
    for weight_decay in (0.0, decay):
        t = galore(
            tmp_path, weight_decay=weight_decay, max_steps=1, save_strategy="no", learning_rate=lr, warmup_steps=0
        )
        t.train()
        results.append(t.model.model.layers[0].mlp.up_proj.weight.detach())
    start = tiny_llama().model.layers[0].mlp.up_proj.weight.detach()
    torch.testing.assert_close(results[0] - results[1], lr * decay * start, rtol=0, atol=1e-7)


def test_accumulation_equals_the_large_batch(tmp_path):
    """One step of 8 and four times 2: the same gradient up to the order of its sums, so 1 % of the movement."""
    results = []
    for size, accumulate in ((8, 1), (2, 4)):
        t = galore(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            save_strategy="no",
            data_seed=3,
        )
        t.train()
        assert {int(state["step"]) for state in inner(t.optimizer).state.values()} == {1}
        results.append(torch.cat([p.detach().flatten() for p in t.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in tiny_llama().parameters()])
    moved = (results[0] - start).norm()
    assert (results[0] - results[1]).norm() < 0.01 * moved


@pytest.mark.parametrize("optim", ALL_NAMES[2:])
def test_layerwise_refuses_accumulation_and_global_clipping_at_the_start(optim, tmp_path):
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4: .* set gradient_accumulation_steps=1"):
        galore(tmp_path, optim, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="max_grad_norm=1.0: .*clip_per_parameter"):
        galore(tmp_path, optim, max_grad_norm=1.0)


def test_clipping_reaches_the_step(tmp_path):
    """Moments see the clipped gradient: with max_grad_norm a tenth of the norm, so is the first moment."""
    moments = []
    for clip in (1e9, None):
        limit = clip or history(t, "grad_norm")[0] / 10  # noqa: F821  (of the run before)
        options = {"refresh": "select", "matmul": "float32"}  # nothing that rounds a tenth otherwise
        t = galore(tmp_path, options=options, max_steps=1, save_strategy="no", max_grad_norm=limit)
        t.train()
        moments.append(state_by_name(inner(t.optimizer))["model.layers.0.mlp.up_proj.weight"]["exp_avg"])
    torch.testing.assert_close(moments[0] / 10, moments[1], rtol=1e-4, atol=1e-9)
    assert history(t, "grad_norm")[0] == pytest.approx(10 * limit, rel=1e-4), "logged is the norm before clipping"


@pytest.mark.parametrize("optim", NAMES)
def test_layerwise_is_the_same_training_and_logs_the_true_norm(optim, tmp_path):
    plain = galore(tmp_path / "plain", optim, max_grad_norm=1e9)  # clips nothing, but has the norm logged
    layerwise = galore(tmp_path / "layerwise", f"{optim}_layerwise")
    plain.train()
    layerwise.train()
    assert differences(snapshot(plain), snapshot(layerwise)) == []
    assert history(plain, "loss") == history(layerwise, "loss")
    assert history(layerwise, "grad_norm") == pytest.approx(history(plain, "grad_norm"), rel=1e-4)
    assert min(history(layerwise, "grad_norm")) > 0


def test_clipping_of_each_parameter_in_layerwise(tmp_path):
    t = galore(tmp_path, ALL_NAMES[2], {"clip_per_parameter": 0.01}, max_steps=1, save_strategy="no")
    t.train()
    state = state_by_name(inner(t.optimizer))["model.layers.0.mlp.up_proj.weight"]
    assert 0 < state["exp_avg"].norm() <= 0.1 * 0.01 * (1 + 1e-3)
    assert history(t, "grad_norm")[0] > 0.01


# -- gradients that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", ["subspace", "svd", "select", "random"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_bad_gradient_at_a_refresh_keeps_the_subspace(bad, refresh, tmp_path, caplog):
    """Every matrix refreshes at every step; the second gradient of one is bad, and step() does not raise.

    Layerwise, because otherwise the Trainer's clipping spreads it over all gradients.
    """
    name, model, calls = "model.layers.0.mlp.up_proj.weight", tiny_llama(), iter(range(100))
    weight, seen = model.get_parameter(name), {}

    def poison(grad):
        if next(calls) != 1:
            return grad
        seen["weight"] = weight.detach().clone()
        seen["state"] = {k: torch.as_tensor(v).clone() for k, v in states().items() if not isinstance(v, str)}
        return grad.index_fill(0, torch.tensor([3]), bad)

    weight.register_hook(poison)
    options = {"refresh": refresh, "update_proj_gap": 1, "stagger": "false"}
    t = galore(tmp_path, ALL_NAMES[2], options, model=model, max_steps=2, save_strategy="no")

    def states():
        return state_by_name(inner(t.optimizer))[name]

    with caplog.at_level(logging.WARNING, "hf_memopt"):
        t.train()
    after = states()
    assert torch.equal(seen["weight"], weight)
    if refresh != "random":
        assert "The subspace of model.layers.0.mlp.up_proj.weight stays as it is" in caplog.text
        kept = [key for key in seen["state"] if key.startswith(("projector", "exp_avg")) or key == "step"]
        assert all(torch.equal(seen["state"][key], torch.as_tensor(after[key])) for key in kept)
        assert after["refresh_at"] <= 3, "the next step tries again"
    assert (int(after["step"]), after["skipped"]) == (1, 1)
    assert inner(t.optimizer).skipped_steps == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(v.isfinite().all() for v in after.values() if torch.is_tensor(v) and v.is_floating_point())


def test_a_grad_scaler_skips_the_step(tmp_path):
    """fp16's loss scaling: an infinite gradient leaves weights, moments and subspaces alone, and training goes on."""
    model = tiny_llama().train()
    optimizer = galore(tmp_path, "galore_taco_adamw", model=model).create_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    batch = {key: torch.stack([row[key] for row in texts(4)]) for key in ("input_ids", "labels")}
    for step, poison in enumerate((False, True, False)):
        weights = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(**batch).loss).backward()
        if poison:
            model.lm_head.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert moved != poison, step
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


# -- what is projected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", NAMES)
def test_the_start_table_says_what_is_projected_and_what_not(optim, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_memopt"):
        t = galore(tmp_path, optim, max_steps=1, save_strategy="no")
        t.train()
    (table,) = [r.getMessage() for r in caplog.records if "bits/param" in r.getMessage()]
    assert re.search(r"projected +rank 16 of 64 +0\.1 +14 +81,920 .*KiB", table)
    rest = "ternary" if "taco" in optim else "dense"
    assert re.search(rf"{rest} +embedding or output head +0\.1 +2 +16,384 .*KiB", table)
    assert re.search(r"dense +vector +0 +5 +320", table)
    measured = inner(t.optimizer).memory_report()
    declared = galore(tmp_path, optim).create_optimizer().memory_report()
    assert measured.measured and not declared.measured
    assert [row.state_bytes for row in measured.rows] == [row.state_bytes for row in declared.rows]
    assert measured.state_bytes < 8 * measured.parameters / 2, "less than half of fp32 AdamW's"


@pytest.mark.parametrize("targets", ["all-linear", None])
def test_gpt2_with_its_transposed_layers(targets, tmp_path):
    """``Conv1D`` keeps (in, out); transformers' own GaLore sees no linear layer in GPT-2 at all."""
    t = galore(tmp_path, model=gpt2(), optim_target_modules=targets, max_steps=4, save_strategy="no")
    t.train()
    layers = {f"transformer.h.0.{m}.weight" for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    head = {"transformer.wte.weight"}  # tied to it; named by all-linear, an embedding by default
    assert projected(t.optimizer) == (layers | head if targets else layers)
    assert history(t, "loss")[-1] < history(t, "loss")[0]
    state = state_by_name(inner(t.optimizer))["transformer.h.0.attn.c_attn.weight"]  # (64, 192)
    assert state["side"] == "left" and state["exp_avg"].shape == (16, 192)


def test_experts_have_a_projector_each(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=4,
    )
    model = Qwen3MoeForCausalLM(config)
    stacks = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 3}
    if not stacks:
        pytest.skip("this transformers keeps experts as separate linear layers")
    t = galore(tmp_path, model=model, max_steps=3, save_strategy="no")
    t.train()
    assert stacks.keys() <= projected(t.optimizer)
    states = state_by_name(inner(t.optimizer))
    for name, before in stacks.items():
        experts, rows, columns = before.shape
        codes, moment = states[name]["projector.codes"], states[name]["exp_avg"]
        assert codes.shape == (experts, min(rows, columns), 16)
        assert moment.shape == (experts * 16, max(rows, columns))
        assert len({codes[i].numpy().tobytes() for i in range(experts)}) == experts, "each expert has its own"
        moved = (model.get_parameter(name).detach() - before).flatten(1).norm(dim=1)
        assert (moved > 0).all()


def test_a_tied_head_is_there_once(tmp_path):
    """SmolLM2 ties the output head to the embedding: by default it is not projected, named it is, and once."""
    by_default = galore(tmp_path, model=tiny_llama(tie_word_embeddings=True)).create_optimizer()
    named = galore(tmp_path, model=tiny_llama(tie_word_embeddings=True), optim_target_modules=["lm_head", "mlp"])
    assert treatments(by_default)["model.embed_tokens.weight"] == "dense"
    assert "lm_head.weight" not in treatments(by_default)
    optimizer = named.create_optimizer()
    assert treatments(optimizer)["model.embed_tokens.weight"] == "projected"
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == len(list(named.model.parameters()))
    named.args.max_steps = 2
    named.train()


@pytest.mark.parametrize("optim", BOTH_WAYS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim_args": "ranks=64"}, r"galore\w*: there is no option 'ranks'; the options are .*rank: int or float"),
        ({"optim_args": "rank=16,proj_type=both"}, r"option 'proj_type' must be std\|reverse_std\|left\|right"),
        ({"optim_args": "rank=16,"}, "'' in options 'rank=16,' is not 'key=value'"),
        ({"optim_target_modules": ["q_porj"]}, "'q_porj' matches no module with a trainable matrix"),
        ({"optim_target_modules": "attn"}, "'attn' matches no module .*a string is a regular expression"),
        ({"optim_args": "rank=64"}, r"No parameter would be projected at rank=64 \(.*\): choose .*taco_adamw"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(optim, changes, sentence, tmp_path):
    t = galore(tmp_path, optim, **changes)
    with pytest.raises(ValueError, match=sentence) as error:
        t.train()
    assert "\n" not in str(error.value) and t.state.global_step == 0


def test_a_string_a_list_and_the_expressions_of_transformers_documentation(tmp_path):
    def chosen(targets):
        return projected(galore(tmp_path, optim_target_modules=targets).create_optimizer())

    attention = {n for n, _ in tiny_llama().named_parameters() if "self_attn" in n}
    assert chosen(["attn"]) == chosen(r".*attn\..*") == chosen([r".*.attn.*"]) == attention
    assert chosen([r".*.attn.*", r".*.mlp.*"]) == chosen(None)
    assert chosen("all-linear") == chosen(None) | {"lm_head.weight"}


# -- PEFT --------------------------------------------------------------------------------------------------------------


def lora(r, **config):
    peft = pytest.importorskip("peft")
    settings = {"r": r, "lora_alpha": r, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(**{**settings, **config}))


def test_adapters_smaller_than_the_rank_alone_are_refused_with_the_way_out(tmp_path):
    t = galore(tmp_path, model=lora(8), optim_target_modules="all-linear")
    with pytest.raises(ValueError, match="No parameter would be projected at rank=16 .*train with taco_adamw"):
        t.train()


def test_adapters_smaller_than_the_rank_are_left_alone_beside_layers_that_are_not(tmp_path):
    """``["q_proj"]`` names the adapters inside too; the layer that PEFT saves whole is projected, they are not."""
    model = lora(8, modules_to_save=["up_proj"])
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    t = galore(
        tmp_path, model=model, optim_target_modules=["q_proj", "v_proj", "up_proj"], max_steps=4, save_strategy="no"
    )
    t.train()
    found = treatments(t.optimizer)
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert {treatment for name, treatment in found.items() if "lora_" in name} == {"dense"}
    whole = [name for name in found if "modules_to_save" in name]
    assert len(whole) == 2 and projected(t.optimizer) == set(whole)
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    table = inner(t.optimizer).memory_report()
    assert sum(row.state_bytes for row in table.rows if row.treatment == "dense") < 9 * adapters


def test_an_adapter_moves_although_its_first_gradient_is_zero(tmp_path):
    """B begins at zero, so A's first gradient is zero; a limiter without a floor would hold A back for ever."""
    model = lora(64)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
    options = {"residual": "fira", "update_proj_gap": 10}
    t = galore(tmp_path, model=model, options=options, max_steps=30, save_strategy="no", lr_scheduler_type="constant")
    t.train()
    assert before.keys() <= projected(t.optimizer)
    states = state_by_name(inner(t.optimizer))
    for name, start in before.items():
        update = (model.get_parameter(name).detach() - start).norm() / start.norm()
        assert update > 0.1, f"{name} moved by {update:.4f} of its norm in 30 steps at learning rate 0.01"
        assert states[name]["residual_norm"].item() > 0


def test_fully_frozen_layers_cost_nothing(tmp_path):
    model = tiny_llama()
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    t = galore(tmp_path, model=model, max_steps=2, save_strategy="no")
    before = [p.detach().clone() for p in model.model.layers[0].parameters()]
    t.train()
    assert all(torch.equal(a, b) for a, b in zip(before, model.model.layers[0].parameters(), strict=True))
    report = inner(t.optimizer).memory_report()
    assert report.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_heads_and_vectors_alone_are_refused(tmp_path):
    model = tiny_llama().requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="1 x embedding or output head.*train with taco_adamw"):
        galore(tmp_path, model=model).create_optimizer()
    named = galore(tmp_path, model=model, optim_target_modules=["lm_head"]).create_optimizer()
    assert projected(named) == {"lm_head.weight"}
    assert isinstance(model.lm_head, nn.Linear)
