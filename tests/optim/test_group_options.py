"""Options that a parameter group sets itself are checked like the constructor's, and afterwards left to schedulers."""

from __future__ import annotations

import pytest
import torch

from hf_memopt import GaLoreAdamW, Taco, TacoAdamW
from tests.cases import parameter
from tests.optim.common import train

KINDS = {
    "TacoAdamW": (TacoAdamW, {}),
    "Taco": (Taco, {"treatment": "one_sparse"}),
    "GaLoreAdamW": (GaLoreAdamW, {"treatment": "projected", "rank": 4}),
}
WRONG = [
    ("lr", -1e-3),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("lr", "1e-3"),
    ("lr", None),
    ("lr", True),
    ("lr", torch.tensor([0.1, 0.2])),
    ("lr", torch.tensor(-0.1)),
    ("lr", torch.tensor(True)),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.999)),
    ("betas", (0.9,)),
    ("betas", (0.9, float("nan"))),
    ("betas", ("0.9", "0.999")),
    ("betas", 0.9),
    ("betas", "ab"),
    ("eps", -1e-8),
    ("eps", float("nan")),
    ("eps", "1e-8"),
    ("eps", None),
    ("weight_decay", -0.1),
    ("weight_decay", float("inf")),
    ("weight_decay", "0.1"),
    ("weight_decay", False),
    ("seed", -1),
    ("seed", True),
    ("seed", 1.0),
    ("seed", "7"),
    ("stochastic_rounding", 1),
    ("stochastic_rounding", "false"),
    ("stochastic_rounding", None),
    ("maximize", 0),
    ("maximize", "true"),
]
kinds = pytest.mark.parametrize("kind, own", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("key, value", WRONG, ids=str)
def test_refused_wherever_it_is_given(kind, own, key, value):
    """By the constructor, in its groups and in later ones, with the same sentence; a refused group is not kept."""

    def group():
        return {"params": [parameter(64, 100)], **own}

    optimizer = kind([group()])
    sentences = []
    for given in (
        lambda: kind([group()], **{key: value}),
        lambda: kind([group(), {**group(), key: value}]),
        lambda: optimizer.add_param_group({**group(), key: value}),
    ):
        with pytest.raises(ValueError, match=f"^{key} must be [^\n]*\\.$") as found:
            given()
        sentences.append(str(found.value))
    assert len(set(sentences)) == 1 and len(optimizer.param_groups) == 1
    train(optimizer, range(1))


@kinds
def test_other_keys_and_legal_values_are_taken_as_they_are(kind, own):
    more = {
        "initial_lr": "any",
        "name": "decay",
        "fused": None,
        "lr": torch.tensor(0.01),
        "betas": [0.8, 0.9],
        "eps": 0,
    }
    optimizer = kind([{"params": [parameter(64, 100)], **own, **more}])
    assert {key: optimizer.param_groups[0][key] for key in more} == more
    train(optimizer, range(2))


@kinds
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_and_checkpoints_go_on(kind, own, as_tensor):
    lr = torch.tensor(0.01) if as_tensor else 0.01
    optimizer = kind([{"params": [parameter(64, 100)], **own, "lr": lr}])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    for _ in range(3):
        train(optimizer, range(1))
        scheduler.step()
    again = kind([{"params": [parameter(64, 100)], **own}])
    again.load_state_dict(optimizer.state_dict())
    assert float(again.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])
    again.param_groups[0]["lr"] = torch.tensor(0.5)
    train(again, range(1))
