"""The course of training: any optimizer on the carriers, refreshes, accumulation, scaled gradients, what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers.optimization import Adafactor

from hf_memopt import CompActAdamW, CompActConfig, TacoAdamW, compress_activations
from hf_memopt.activations.compression import compressions_of
from tests.activations.compressed import TOKENS, N, blocks, carrier, gradients, sgd, step
from tests.activations.test_compression import optimizer_of, train
from tests.activations.zoo import batch, build
from tests.cases import randn
from tests.tolerances import E


def adamw8bit(params, **options):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(params, min_8bit_size=1024, **options)


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, one tensor at a time": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, rate in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(3e-3)}),
    "Adam with decay of its own": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
    "bitsandbytes' AdamW8bit": (adamw8bit, {}),
    "TacoAdamW": (TacoAdamW, {}),
    "CompActAdamW": (CompActAdamW, {"state": "fp32"}),
    "CompActAdamW, ternary": (CompActAdamW, {"state": "ternary"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_the_carriers(name, dtype):
    cls, options = OPTIMIZERS[name]
    model = build("llama", dtype)
    compression = compress_activations(model, CompActConfig(rank=0.5, update_proj_gap=4))
    before = {n: layer.weight.clone() for n, layer in compression.layers.items()}
    optimizer = optimizer_of(model, cls, **options)
    losses = train(model, optimizer, batch("llama"), 12)
    assert losses[-1] < 0.9 * losses[0]
    assert compression.steps == 12 and compressions_of(optimizer) == [compression]
    for n, layer in compression.layers.items():
        assert not torch.equal(before[n], layer.weight) and layer.weight.isfinite().all(), n
        assert not carrier(layer).any(), n


def test_without_a_rate_of_its_own_an_optimizer_may_not_decay():
    """Adafactor's relative steps have lr=None."""
    _, ours, _ = blocks()
    step(ours, Adafactor([p for p in ours.parameters() if p.requires_grad]))
    decaying = Adafactor([p for p in ours.parameters() if p.requires_grad], weight_decay=0.1)
    with pytest.raises(ValueError, match="Adafactor has no learning rate .lr=None.*weight_decay=0"):
        step(ours, decaying)


# -- refreshes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("principal", [1, 1, 2, 2, 2, 3, 3]), ("gaussian", [0, 0, 1, 1, 1, 2, 2]), ("structured", [0, 0, 1, 1, 1, 2, 2])],
)
def test_refreshes_come_when_they_are_due(kind, expected):
    """Every third step; by energy also after the first, which has seen some."""
    _, ours, compression = blocks(projection=kind, update_proj_gap=3)
    optimizer, epochs = sgd(ours), []
    for i in range(7):
        collecting = [basis.collecting for basis in compression.bases()]
        assert set(collecting) == {kind == "principal" and i in (0, 2, 5)}
        step(ours, optimizer, seed=i)
        assert len({basis.epoch for basis in compression.bases()}) == 1
        assert all((basis.top is not None) == (kind == "principal") for basis in compression.bases())
        assert all(basis.energy is None for basis in compression.bases())
        epochs.append(compression.bases()[0].epoch)
    assert epochs == expected


def test_the_chosen_coordinates_have_the_most_energy_of_the_step():
    _, ours, compression = blocks()
    read = {}
    for name, layer in compression.layers.items():
        layer.register_forward_pre_hook(
            lambda module, args, name=name: read.setdefault(name, []).append(args[0].detach())
        )
    optimizer = sgd(ours)
    optimizer.zero_grad()
    for i in range(2):  # two micro-batches
        ours(randn(*TOKENS, N, seed=i)).square().mean().backward()
    optimizer.step()
    for basis in compression.bases():
        energy = sum(x.double().square().sum((0, 1)) for x in read[basis.name])
        assert basis.top.tolist() == energy.topk(basis.rank // 2).indices.sort().values.tolist(), basis.name


def test_evaluation_between_steps_changes_nothing():
    runs = []
    for evaluates in (False, True):
        _, ours, compression = blocks()
        optimizer = sgd(ours)
        for i in range(4):
            step(ours, optimizer, seed=i)
            if evaluates:
                ours.eval()
                with torch.no_grad():
                    ours(1e3 * randn(*TOKENS, N))
                ours.train()
        runs.append(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*map(dict.values, runs), strict=True))


# -- gradients that come in parts, are scaled, or not finite -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["principal", "orthonormal"])
def test_accumulation_is_one_large_batch(kind):
    x = randn(8, 5, N)
    found = []
    for parts in (1, 4):
        _, ours, compression = blocks(projection=kind)
        for part in x.chunk(parts):
            (ours(part).square().mean() / parts).backward()
        found.append((gradients(ours), [basis.energy for basis in compression.bases()]))
    largest = max(g.abs().max() for g in found[0][0].values())
    for name, whole in found[0][0].items():
        # sums of 40 rows in four parts, of at most five layers one behind the other: 40 E each, of the largest gradient
        # (those of the key's bias cancel to zero)
        assert ((whole - found[1][0][name]).abs() <= 200 * E * largest).all(), name
        assert whole.abs().max() > 1e3 * E * largest or name.endswith("key.bias"), name
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one is None) == (kind != "principal")
        assert one is None or torch.allclose(one, other, rtol=50 * E, atol=0)


def scaled_step(model, optimizer, scaler, x) -> None:
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e9)
    scaler.step(optimizer)
    scaler.update()


def test_a_gradscalers_skipped_step_is_none():
    _, ours, compression = blocks()
    _, other, _ = blocks()
    optimizer, scaler = sgd(ours, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reference = sgd(other, momentum=0.9)
    for i in range(4):
        x = randn(*TOKENS, N, seed=i)
        if i == 1:
            before = [p.clone() for p in ours.parameters()]
            scaled_step(ours, optimizer, scaler, x * float("inf"))
            assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))
            assert compression.steps == 1 and scaler.get_scale() == 2.0**9
        scaled_step(ours, optimizer, scaler, x)
        step(other, reference, seed=i)
    # the scale is a power of two, so scaled gradients are the same numbers
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("state", ["fp32", "ternary"])
def test_a_gradient_that_is_not_finite_leaves_the_weight_alone(state):
    model = build("llama")
    compression = compress_activations(model)
    optimizer = CompActAdamW(
        [(n, p) for n, p in model.named_parameters() if p.requires_grad], weight_decay=0.5, state=state
    )
    train(model, optimizer, batch("llama"), 1)
    hurt = compression.layers["model.layers.0.mlp.up_proj"]
    before = hurt.weight.clone()
    optimizer.zero_grad()
    model(**batch("llama")).loss.backward()
    carrier(hurt).grad[0, 0] = float("nan")
    optimizer.step()
    assert torch.equal(before, hurt.weight) and optimizer.skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


# -- what cannot work is said ------------------------------------------------------------------------------------------


def test_an_optimizer_from_before_the_compression_is_refused():
    plain, _, _ = blocks()
    optimizer = torch.optim.AdamW(plain.parameters())
    compress_activations(plain, CompActConfig(recompute="none"))
    with pytest.raises(
        RuntimeError, match=r"AdamW was made before the activations were compressed.*compress_activations first"
    ):
        step(plain, optimizer)


def test_two_optimizers_are_refused():
    _, ours, compression = blocks()
    carriers = [carrier(layer) for layer in compression.layers.values()]
    first, second = torch.optim.SGD(carriers[:5], lr=0.1), torch.optim.SGD(carriers[5:], lr=0.1)
    ours(randn(*TOKENS, N)).sum().backward()
    for optimizer in (first, second):
        with pytest.raises(
            RuntimeError, match="SGD holds 5 of 10 carriers.*give all parameters of the model to one optimizer"
        ):
            optimizer.step()


def test_frozen_carriers_may_be_left_out():
    _, ours, compression = blocks()
    layer = compression.layers["blocks.0.expand"]
    carrier(layer).requires_grad_(False)
    before = layer.weight.clone()
    step(ours, sgd(ours))
    assert torch.equal(before, layer.weight) and compression.steps == 1


def test_an_optimizer_of_another_model_concerns_nobody():
    _, ours, compression = blocks()
    other, _, _ = blocks()
    step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert compression.steps == 0
    step(ours, sgd(ours))
    assert compression.steps == 1


def test_one_optimizer_of_two_compressed_models_is_refused():
    """The state of both would have one place in the optimizer."""
    (_, one, _), (_, two, _) = blocks(), blocks(seed=6)
    optimizer = sgd(torch.nn.ModuleList([one, two]))
    with pytest.raises(RuntimeError, match="SGD holds the carriers of 2 compressed models: use one optimizer for each"):
        step(one, optimizer)
