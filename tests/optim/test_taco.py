"""``taco``: the step against its equations, odd shapes and layouts, bytes, resume."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hf_memopt import Taco, TacoAdamW, build_param_groups, import_adamw_state
from hf_memopt.codecs.one_sparse import OneSparseHistory, as_columns
from hf_memopt.kernels.one_sparse import largest
from tests.cases import parameter, randn
from tests.optim.common import same_bits, snapshot, state_equal, train
from tests.reference.one_sparse_twin import one_sparse_step

SHAPES = [(96, 64), (64, 96), (1, 5000), (5000, 1), (2, 3000), (16, 300), (17, 301), (9000, 2), (33, 159)]
FP8_STEP = 2.0**-4  # half a unit of 3 bits of mantissa, relative to the value
SUBNORMAL = 2.0**-10 / 448  # half of the smallest FP8 number, relative to the column's largest entry


def one_sparse(p, **options):
    options = {"lr": 1e-2, "lr_scale": 1.0, **options}
    return Taco([{"params": [p], "treatment": "one_sparse"}], **options)


def histories(optimizer, p, columns: int) -> list[dict[int, float]]:
    """What is stored, as the twin has it; an entry of value 0 stands for nothing."""
    state = optimizer.state.get(p, {})
    if "history.values" not in state:
        return [{} for _ in range(columns)]
    values = state["history.values"].float() * state["history.scale"].float()[:, None]
    rows = state["history.rows"].to(torch.int64)
    pairs = zip(rows.tolist(), values.tolist(), strict=True)
    return [{i: v for i, v in zip(r, vs, strict=True) if v != 0} for r, vs in pairs]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [0, 4, 16])
@pytest.mark.parametrize("weight_decay, consume", [(0.0, 1.0), (0.1, 1.0), (0.0, 0.5), (0.0, 0.0)])
def test_against_the_twin(shape, k, weight_decay, consume):
    p = parameter(*shape)
    optimizer = one_sparse(p, k=k, weight_decay=weight_decay, consume=consume)
    for t in range(4):
        before, history = p.detach().clone(), histories(optimizer, p, shape[1])
        p.grad = randn(*shape, seed=t)
        optimizer.step()
        rule = {"lr": 1e-2, "k": min(k, shape[0] - 1), "decay": 0.9, "consume": consume}
        factor = 1 - 1e-2 * weight_decay
        weight, expected, moved = one_sparse_step(before, p.grad, history, **rule, weight_decay_factor=factor)
        torch.testing.assert_close(p.detach().double(), weight, rtol=2e-7, atol=1e-8)  # fp32 against double
        for stored, wanted in zip(histories(optimizer, p, shape[1]), expected, strict=True):
            largest = max(map(abs, wanted.values()), default=0.0)
            for row, value in wanted.items():
                tolerance = FP8_STEP * abs(value) + 2 * SUBNORMAL * largest
                assert abs(stored.get(row, 0.0) - value) <= tolerance + 2.0**-7 * abs(value)  # the scale is bf16
            assert set(stored) <= set(wanted)
        assert len(moved) == shape[1]


def test_the_applied_entry_leaves_and_the_next_gets_its_turn():
    p = nn.Parameter(torch.zeros(4, 1024))
    optimizer = one_sparse(p, k=3)
    p.grad = torch.tensor([4.0, 3.0, -2.0, 1.0])[:, None].expand(4, 1024).clone()
    optimizer.step()
    p.grad = torch.zeros_like(p)
    rows = []
    for _ in range(4):
        before = p.detach().clone()
        optimizer.step()
        rows.append((p.detach() - before)[:, 0].tolist())
    assert p[0, 0].item() == pytest.approx(-1e-2)
    assert [[round(100 * x) for x in row] for row in rows] == [
        [0, -1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, -1],
        [0, 0, 0, 0],  # the queue is empty: a column of zeros does not move
    ]


def test_ties_move_one_entry_and_always_the_same():
    moved = []
    for _ in range(2):
        p = nn.Parameter(torch.zeros(64, 100))
        optimizer = one_sparse(p)
        p.grad = torch.ones(64, 100)
        optimizer.step()
        assert ((p != 0).sum(dim=0) == 1).all()
        moved.append(p.detach().clone())
    assert torch.equal(*moved)


def test_columns_without_gradient_do_not_move_and_nonfinite_ones_skip_the_parameter():
    p = parameter(80, 90)
    before = p.detach().clone()
    optimizer = one_sparse(p)
    p.grad = randn(80, 90)
    p.grad[:, 7] = 0
    optimizer.step()
    assert torch.equal(p[:, 7], before[:, 7]) and ((p != before).sum(dim=0) == 1).sum() == 89
    weights, state = snapshot(optimizer)
    for bad in (float("nan"), float("inf"), 1e20):
        p.grad = randn(80, 90, seed=1)
        p.grad[3, 4] = bad
        optimizer.step()
    assert optimizer.skipped_steps == 3 and torch.equal(p, weights[0])
    for key, value in state["state"][0].items():
        if key.startswith("history"):
            assert same_bits(optimizer.state[p][key], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_16_bit_weights_are_rounded_without_bias(dtype, weight_decay):
    p = nn.Parameter(torch.ones(512, 512, dtype=dtype))
    optimizer = one_sparse(p, lr=1e-3, k=4, weight_decay=weight_decay)  # under half a unit of bf16 at 1
    p.grad = randn(512, 512, dtype=dtype)
    signs = torch.sign(p.grad.float())
    optimizer.step()
    expected = 1e-3 * weight_decay
    touched = p.grad.float().abs() == p.grad.float().abs().amax(dim=0)
    if dtype == torch.bfloat16 and not weight_decay:
        moves = (p.float() - 1)[touched]
        assert 0 < (moves != 0).float().mean() < 1
        # unbiased: 512 draws of a two-valued number with a unit of 2^-8 (2^-7 above 1); five standard errors
        assert abs((-moves * signs[touched]).mean() - 1e-3) < 5 * 2.0**-7 / 2 / 512**0.5
    rest = (1 - p.float())[~touched]
    assert abs(rest.mean() - expected) < 5 * 2.0**-8 / 512 if weight_decay else (rest == 0).all()


@pytest.mark.parametrize(
    "layout, shape, back",
    [
        ("matrix", (70, 90), lambda x: x[None]),
        ("transposed", (90, 70), lambda x: x.T[None]),
        ("stack", (3, 70, 90), lambda x: x),
        ("stack_transposed", (3, 90, 70), lambda x: x.transpose(1, 2)),
    ],
)
def test_a_column_is_an_input_feature_in_every_layout(layout, shape, back):
    p = parameter(*shape)
    optimizer = Taco([{"params": [p], "treatment": "one_sparse", "layout": layout}], lr=1e-2, k=8, weight_decay=0.1)
    matrices = [nn.Parameter(m.clone()) for m in back(p.detach())]
    plain = Taco([{"params": matrices, "treatment": "one_sparse"}], lr=1e-2, k=8, weight_decay=0.1)
    for t in range(3):
        p.grad = randn(*shape, seed=t)
        for matrix, g in zip(matrices, back(p.grad), strict=True):
            matrix.grad = g.clone()
        optimizer.step()
        plain.step()
    assert torch.equal(back(p), torch.stack([m.detach() for m in matrices]))
    values = torch.cat([plain.state[m]["history.values"].float() for m in matrices])
    assert torch.equal(optimizer.state[p]["history.values"].float(), values)


@pytest.mark.parametrize("m", [2176, 2177, 4096, 40])
def test_two_stages_find_the_same_entries(m):
    c = randn(m, 33)
    c[:, 5] = 0
    c[7:20, 6] = 3.0  # ties
    rows, values = largest(c, 17)
    assert torch.equal(values.abs(), c.abs().topk(17, dim=0).values.t())
    assert torch.equal(values, c.t().gather(1, rows))
    assert all(len(set(row)) == 17 for row in rows.tolist())


def test_tiles_do_not_change_the_numbers(monkeypatch):
    runs = []
    for tile in (1 << 20, 700):
        monkeypatch.setattr("hf_memopt.kernels.one_sparse.TILE", tile)
        p = parameter(100, 120, dtype=torch.bfloat16)
        optimizer = one_sparse(p, weight_decay=0.1)
        train(optimizer, range(3))
        runs.append(snapshot(optimizer))
    assert state_equal(*runs)


def test_bits_a_parameter():
    p = parameter(4096, 4096)
    optimizer = one_sparse(p)
    declared = optimizer.memory_report()
    p.grad = torch.ones_like(p)
    optimizer.step()
    measured = optimizer.memory_report()
    assert measured.measured and measured.state_bytes == declared.state_bytes
    assert measured.bits_per_parameter <= 0.15


def test_more_rows_than_16_bits_count():
    p = parameter(70_000, 3)
    optimizer = one_sparse(p)
    p.grad = torch.zeros_like(p)
    p.grad[-3:] = torch.tensor([[1.0], [2.0], [3.0]])
    optimizer.step()
    state = optimizer.state[p]
    assert state["history.rows"].dtype == torch.int32
    assert set(state["history.rows"][0, :2].tolist()) == {69_997, 69_998}


def test_resume_is_bit_equal_and_the_checkpoint_keeps_its_options():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(100, 80), nn.Linear(80, 160), nn.LayerNorm(160)).to(torch.bfloat16)

    def make(m, **options):
        return Taco(build_param_groups(m, weight_decay=0.1, one_sparse=True), lr=1e-3, **options)

    whole = make(model(), k=8)
    train(whole, range(3))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    weights = snapshot(whole)[0]
    other = model()
    for p, w in zip((p for g in make(other).param_groups for p in g["params"]), weights, strict=True):
        p.data.copy_(w)
    resumed = make(other, k=32)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert {g["k"] for g in resumed.param_groups} == {8}
    for optimizer in (whole, resumed):
        train(optimizer, range(3, 6))
    assert state_equal(snapshot(whole), snapshot(resumed))


def test_groups_of_a_model():
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=2))
    groups = build_param_groups(gpt2, weight_decay=0.0, no_decay=(), one_sparse=True)
    treatment = {n: (g["treatment"], g.get("layout")) for g in groups for n in g["param_names"]}
    assert treatment["transformer.h.0.attn.c_attn.weight"] == ("one_sparse", "transposed")
    assert treatment["transformer.wte.weight"] == ("ternary", None)
    assert treatment["transformer.h.0.ln_1.weight"] == ("dense", None)
    convolution = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Linear(80, 160), nn.Linear(160, 80))
    groups = build_param_groups(convolution, weight_decay=0.0, no_decay=(), one_sparse=True)
    assert {(g["treatment"], g["reason"]) for g in groups} == {
        ("ternary", "not a linear layer"),
        ("one_sparse", "linear layer"),
        ("ternary", "columns under 128 entries"),
        ("dense", "vector"),
    }


@pytest.mark.parametrize("name", ["MixtralConfig", "GptOssConfig"])
def test_experts(name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_local_experts": 2, "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 32}
    config = getattr(transformers, name)(**small)
    model = transformers.AutoModelForCausalLM.from_config(config)
    groups = build_param_groups(model, weight_decay=0.0, no_decay=(), one_sparse=True)
    layouts = {n: g.get("layout") for g in groups for n in g["param_names"]}
    experts = {n: layout for n, layout in layouts.items() if n.endswith(("gate_up_proj", "down_proj"))}
    if not experts:
        pytest.skip("this transformers keeps experts as single linear layers")
    assert set(experts.values()) == {"stack" if name == "MixtralConfig" else "stack_transposed"}


def test_codec_round_trip():
    moment = randn(300, 70)
    codec = OneSparseHistory(16)
    decoded = codec.decode(codec.encode(moment), moment.shape)
    kept = decoded != 0
    assert (kept.sum(dim=0) == 16).all()
    torch.testing.assert_close(decoded[kept], moment[kept], rtol=FP8_STEP + 2.0**-7, atol=0)
    assert moment.abs().masked_fill(kept, 0).amax() <= moment.abs().masked_fill(~kept, 9).amin(dim=0).amax()
    assert codec.decode({}, torch.Size((1, 5))).shape == (1, 5) and codec.specs(torch.Size((1, 5))) == {}


def test_adamw_state_becomes_the_history():
    p = parameter(80, 90)
    plain = torch.optim.AdamW([p])
    train(plain, range(2))
    optimizer = one_sparse(p, k=5)
    import_adamw_state(optimizer, plain.state_dict())
    expected = OneSparseHistory(5).encode(plain.state[p]["exp_avg"])
    assert all(same_bits(optimizer.state[p][f"history.{part}"], value) for part, value in expected.items())
    train(optimizer, range(2, 3))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_skipped_step_changes_no_bit(weight_decay):
    p = nn.Parameter(torch.full((80, 80), -0.0, dtype=torch.float16))
    optimizer = one_sparse(p, weight_decay=weight_decay)
    p.grad = torch.full_like(p, float("nan"))
    before = p.detach().clone()
    optimizer.step()
    assert same_bits(p, before)


def test_options_of_groups_are_checked():
    p = parameter(80, 90)
    for wrong, sentence in (
        ({"k": -1}, "k must be"),
        ({"k": "abc"}, "k must be"),
        ({"lr_scale": -1.0}, "lr_scale must be"),
        ({"consume": 2.0}, "consume must be"),
        ({"decay": 1.5}, "decay must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Taco([{"params": [p], "treatment": "one_sparse", **wrong}])
    with pytest.raises(ValueError, match="w of the group: layout='stack' needs 3 dimensions"):
        Taco([{"params": [("w", p)], "treatment": "ternary", "layout": "stack"}])


def test_a_checkpoint_that_does_not_know_an_option_keeps_ours():
    p = parameter(80, 90)
    optimizer = one_sparse(p, k=5, decay=0.8)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    for key in ("decay", "consume", "dimension_scale"):
        saved["param_groups"][0].pop(key)
    resumed = one_sparse(parameter(80, 90), k=5, decay=0.7)
    resumed.load_state_dict(saved)
    assert (resumed.param_groups[0]["decay"], resumed.param_groups[0]["consume"]) == (0.7, 1.0)
    train(resumed, range(2, 3))


def test_states_of_the_two_optimizers_are_not_mixed_up():
    p = parameter(80, 90)
    plain = TacoAdamW([p])
    train(plain, range(1))
    with pytest.raises(ValueError, match="holds the state of TacoAdamW, not Taco's: resume with the optim="):
        one_sparse(p).load_state_dict(plain.state_dict())
    square = parameter(80, 80)
    optimizer = one_sparse(square)
    train(optimizer, range(1))
    other = Taco([{"params": [square], "treatment": "one_sparse", "layout": "transposed"}])
    with pytest.raises(ValueError, match="keeps other moments"):
        other.load_state_dict(optimizer.state_dict())


def test_a_head_that_peft_wraps_is_a_head():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    for options, expected in (({"one_sparse": True}, "ternary"), ({"dense_embeddings": True}, "dense")):
        groups = build_param_groups(model, **options)
        (head,) = {g["treatment"] for g in groups for n in g["param_names"] if "lm_head" in n}
        assert head == expected


def test_deepcopy():
    p = parameter(80, 90)
    optimizer = one_sparse(p, k=5)
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    for o in (optimizer, twin):
        train(o, range(2, 4))
    assert state_equal(snapshot(optimizer), snapshot(twin))


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"k": -1}, "k must be a whole number from 0 to 1024"),
        ({"k": 2.5}, "k must be a whole number"),
        ({"consume": 1.5}, "consume must be a number from 0 to 1"),
        ({"decay": 1.0}, "decay must be a number of at least 0 and below 1"),
        ({"lr_scale": -1}, "lr_scale must be a number of at least 0"),
        ({"dimension_scale": 1}, "dimension_scale must be True or False"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        one_sparse(parameter(80, 90), **options)


def test_bad_groups():
    with pytest.raises(ValueError, match="layout='rows' is not known"):
        Taco([{"params": [parameter(80, 90)], "treatment": "one_sparse", "layout": "rows"}])
    with pytest.raises(ValueError, match="cannot tell a linear layer from an embedding.*build_param_groups"):
        Taco([parameter(80, 90), parameter(90)])
    assert Taco([parameter(90)]).treatment_of({"treatment": "auto"}, parameter(90)) == "dense"
    with pytest.raises(ValueError, match="needs 3 dimensions"):
        Taco([{"params": [parameter(80, 90)], "treatment": "one_sparse", "layout": "stack"}])
    with pytest.raises(ValueError, match="needs matrices"):
        Taco([{"params": [parameter(90)], "treatment": "one_sparse"}])
    assert as_columns(torch.zeros(3, 4), "transposed").shape == (1, 4, 3)
