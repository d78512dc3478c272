"""The memory simulation of GaLore: byte for byte the real optimizer in a step in which every matrix refreshes.

The real runs are of the real ``GaLoreAdamW`` on real tensors, with the Triton kernels' launches left out
(``conftest.py``).
"""

from __future__ import annotations

import pytest
import torch

from hf_memopt.memory import simulate
from hf_memopt.optim.builders import galore
from hf_memopt.parsing import parse_options
from hf_memopt.registry import get_optimizer
from tests.memory.test_simulate import TOKENS, bytes_of, llama

ONE_LAYER = {"num_hidden_layers": 1}
EVERY_STEP = {"update_proj_gap": 1, "stagger": False}
RATES = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def optimizer(name, **options):
    def build(model):
        spec = get_optimizer(name)
        chosen = parse_options(spec.options, options, strategy=name, preset=spec.preset)
        cls, kwargs = galore(model, chosen, **RATES)
        return cls(**kwargs)

    return build


def varied(model, batch):
    """The loss on tokens that differ: equal ones give attention no gradient."""
    ids = batch["attention_mask"].cumsum(1)
    return model(input_ids=ids, attention_mask=batch["attention_mask"], labels=ids, use_cache=False).loss


def real_and_simulated(build, name, steps=2, **options):
    """Of two optimizers: the real one refreshes at every step because it is told to, the simulated one by itself."""
    asked = {"tokens": TOKENS, "granularity": 1, "steps": steps, "loss": varied}
    real = simulate.measure(build, optimizer(name, **EVERY_STEP, **options), **asked)
    return real, simulate.simulate(build, optimizer(name, **options), **asked)


KINDS = {
    "subspace": ("memopt_galore_adamw", torch.float32, {"refresh": "subspace", "residual": "none"}),
    "subspace, ternary": ("galore_taco_adamw", torch.bfloat16, {"refresh": "subspace", "residual": "none"}),
    "fp32 basis, sign": (
        "memopt_galore_adamw",
        torch.bfloat16,
        {"refresh": "subspace", "projector": "float32", "residual": "sign"},
    ),
    "select, fira, ternary": ("galore_taco_adamw", torch.float32, {"refresh": "select", "residual": "fira"}),
    "random": ("memopt_galore_adamw", torch.bfloat16, {"refresh": "random", "residual": "none"}),
    "svd, adaptive": ("memopt_galore_adamw", torch.bfloat16, {"refresh": "svd", "adaptive": True}),
}


@pytest.mark.parametrize(("name", "dtype", "options"), KINDS.values(), ids=KINDS)
def test_equals_the_real_run(name, dtype, options, launches_left_out):
    products = "float32" if dtype == torch.float32 else "bfloat16"  # on a CPU "auto" may mean another one
    real, simulated = real_and_simulated(llama(dtype, **ONE_LAYER), name, matmul=products, **options)
    assert bytes_of(simulated) == bytes_of(real)
    assert simulated.first_peak_bytes == real.first_peak_bytes
    assert simulated.largest == real.largest


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("memopt_galore_adamw_layerwise", {"frozen": True, "num_hidden_layers": 2}),
        ("galore_taco_adamw_layerwise", {"tied": True}),
    ],
)
def test_layerwise_equals_the_real_run(name, variant, launches_left_out):
    build = llama(torch.bfloat16, **{**ONE_LAYER, **variant})
    real, simulated = real_and_simulated(build, name, refresh="subspace", matmul="bfloat16")

    assert bytes_of(simulated) == bytes_of(real)
    assert simulated.phases["step"].components["gradients"] == 0


@pytest.mark.parametrize(
    ("name", "refresh"),
    [("memopt_galore_adamw", "svd"), ("galore_taco_adamw", "subspace"), ("galore_taco_adamw", "select")],
)
def test_the_state_is_what_the_report_declares(name, refresh):
    build = llama(torch.bfloat16, **ONE_LAYER)
    simulated = simulate.simulate(build, optimizer(name, refresh=refresh), tokens=TOKENS, granularity=1)
    declared = optimizer(name, refresh=refresh)(build()).memory_report()
    assert simulated.phases["step"].components["optimizer state"] == declared.state_bytes
    assert not declared.measured


def test_a_step_with_a_refresh_is_the_higher_one(launches_left_out):
    """What the simulation reports is the worst step: a real run whose last step has no refresh stays below."""
    asked = {"tokens": TOKENS, "granularity": 1, "steps": 3, "loss": varied}
    build = llama(torch.float32, **ONE_LAYER)
    options = {"refresh": "subspace", "residual": "none", "matmul": "float32"}
    calm = simulate.measure(build, optimizer("memopt_galore_adamw", **options, stagger=False), **asked)
    worst = simulate.simulate(build, optimizer("memopt_galore_adamw", **options), **asked)
    temporaries = [m.phases["step"].components["optimizer temporaries"] for m in (calm, worst)]
    assert temporaries[0] < temporaries[1]
