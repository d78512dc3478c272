"""What a user gets for a mistake: one sentence that names it, before anything has changed."""

import logging

import pytest
import torch
from accelerate import Accelerator

from hf_memopt import TacoAdamW, build_param_groups, import_adamw_state


def matrices(count: int = 2) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"w{i}", torch.nn.Parameter(torch.randn(64, 80))) for i in range(count)]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "a"},
        {"seed": -1},
        {"seed": True},
        {"lr": "1e-4"},
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"betas": 0.9},
        {"betas": (0.9, "0.999")},
        {"eps": None},
        {"weight_decay": float("inf")},
        {"stochastic_rounding": "false"},
        {"maximize": 1},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        TacoAdamW(matrices(), **wrong)


@pytest.mark.parametrize("option, kept, ignored", [("seed", 3, 9), ("stochastic_rounding", False, True)])
def test_options_that_the_checkpoint_decides_are_said(option, kept, ignored, caplog):
    saved = stepped(TacoAdamW(matrices(), **{option: kept})).state_dict()
    resumed = TacoAdamW(matrices(), **{option: ignored})
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        resumed.load_state_dict(saved)
    assert resumed.param_groups[0][option] == kept
    assert f"{option}={kept}, which is kept" in caplog.text and f"{option}={ignored} is ignored" in caplog.text


def test_the_same_options_are_not_talked_about(caplog):
    saved = stepped(TacoAdamW(matrices(), seed=3)).state_dict()
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        TacoAdamW(matrices(), seed=3).load_state_dict(saved)
    assert not caplog.records


def test_other_grouping_of_the_same_parameters():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 80))
    plain, dense = (
        TacoAdamW(build_param_groups(model, weight_decay=0.0, no_decay=(), dense_embeddings=d)) for d in (False, True)
    )
    with pytest.raises(ValueError, match="groups the same parameters otherwise .* set the same optim_args"):
        dense.load_state_dict(stepped(plain).state_dict())


def test_other_parameters_are_named():
    saved = stepped(TacoAdamW(matrices(3))).state_dict()
    with pytest.raises(ValueError, match="'w2' is only in the checkpoint"):
        TacoAdamW(matrices(2)).load_state_dict(saved)


def test_import_into_the_trainers_wrapped_optimizer():
    source = stepped(torch.optim.AdamW(matrices())).state_dict()
    bare = TacoAdamW(matrices())
    import_adamw_state(Accelerator(cpu=True).prepare_optimizer(bare), source)
    assert all(float(state["step"]) == 1 for state in bare.state.values()) and len(bare.state) == 2


def test_import_into_another_optimizer_is_refused():
    source = stepped(torch.optim.AdamW(matrices())).state_dict()
    with pytest.raises(ValueError, match="fills an optimizer of hf_memopt, got AdamW"):
        import_adamw_state(torch.optim.AdamW(matrices()), source)


@pytest.mark.parametrize("not_a_state", [{}, None, "optimizer.pt"], ids=repr)
def test_import_of_something_else_is_refused(not_a_state):
    with pytest.raises(ValueError, match=r"takes the state_dict\(\) of a torch.optim.AdamW"):
        import_adamw_state(TacoAdamW(matrices()), not_a_state)


@pytest.mark.parametrize("pattern", ["1", ["2"], ["all-linear"]], ids=str)
def test_a_pattern_without_a_match_explains_itself(pattern):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 80)))
    with pytest.raises(ValueError, match="whole name, a list holds parts of names .*, 'all-linear' stands alone"):
        build_param_groups(model, weight_decay=0.0, no_decay=(), target_modules=pattern)


def test_a_pattern_of_the_wrong_type():
    with pytest.raises(ValueError, match="must be a string or a list"):
        build_param_groups(torch.nn.Linear(64, 80), weight_decay=0.0, no_decay=(), target_modules=7)
