"""The memory simulation of CompAct: byte for byte the real training, for models that the optimizer's builder patches.

The real runs are of the real optimizer on real tensors, with the Triton kernels' launches left out (``conftest.py``).
"""

from __future__ import annotations

import pytest
import torch

from hf_memopt import CompActConfig, compress_activations
from hf_memopt.memory import simulate
from hf_memopt.optim import TacoAdamW
from hf_memopt.optim.builders import compact
from hf_memopt.parsing import parse_options
from hf_memopt.registry import get_optimizer
from tests.memory.test_simulate import TOKENS, bytes_of, llama

PROJECTIONS = ("principal", "structured", "orthonormal", "gaussian")
LAYERS = {"num_hidden_layers": 1}
RATES = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


def optimizer(name, weight_decay=0.1, **options):
    def build(model):
        spec = get_optimizer(name)
        chosen = parse_options(spec.options, options, strategy=name, preset=spec.preset)
        cls, kwargs = compact(model, chosen, weight_decay=weight_decay, **RATES)
        return cls(**kwargs)

    return build


def recomputing(model):
    compress_activations(model, CompActConfig(rank=None))
    return TacoAdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad], **RATES)


def plain(model):
    return TacoAdamW(model.named_parameters(), **RATES)


def both(build, build_optimizer, **options):
    asked = {"tokens": TOKENS, "granularity": 1, **options}
    return simulate.simulate(build, build_optimizer, **asked), simulate.measure(build, build_optimizer, **asked)


def assert_equal(simulated, real):
    assert bytes_of(simulated) == bytes_of(real)
    assert simulated.first_peak_bytes == real.first_peak_bytes
    assert simulated.largest == real.largest
    assert simulated.parameters == real.parameters


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", ["compact_adamw", "compact_taco_adamw_layerwise"])
def test_equals_the_real_run(name, projection, checkpointing, launches_left_out):
    options = {"gradient_checkpointing": checkpointing}
    assert_equal(*both(llama(torch.bfloat16, **LAYERS), optimizer(name, projection=projection), **options))


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_equals_the_real_run_with_z_kept_and_no_decay(projection, launches_left_out):
    build = optimizer("compact_adamw", projection=projection, recompute="none", weight_decay=0.0, rank=16)
    assert_equal(*both(llama(torch.float32, **LAYERS), build, gradient_checkpointing=False, steps=3))


def test_equals_the_real_run_of_several_layers_and_reentrant_checkpointing(launches_left_out):
    build = llama(torch.bfloat16, num_hidden_layers=3)
    assert_equal(*both(build, optimizer("compact_adamw_layerwise"), gradient_checkpointing="reentrant"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equals_the_real_run_of_recomputation_alone(checkpointing, launches_left_out):
    build = llama(torch.bfloat16, **LAYERS)
    assert_equal(*both(build, recomputing, gradient_checkpointing=checkpointing))


def test_every_byte_is_counted_as_what_it_is():
    """Weights are the model's and the carriers, gradients are those of what is trained."""
    build, name = llama(torch.bfloat16, **LAYERS), "compact_adamw"
    found = simulate.simulate(build, optimizer(name), tokens=TOKENS, granularity=1, gradient_checkpointing=False)
    model = build()
    elements = sum(p.numel() for p in model.parameters())
    declared = optimizer(name)(model).memory_report()
    every = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert found.parameters == elements and every > 2 * elements
    assert found.phases["step"].components["weights"] == every
    assert found.phases["step"].components["gradients"] == found.after["backward"].components["gradients"] == trained
    top = 4 * found_top(model)
    assert found.phases["step"].components["optimizer state"] == declared.state_bytes + top
    assert found.after["step"].components["gradients"] == found.after["step"].components["activations"] == 0


def found_top(model):
    """Coordinates that are chosen by energy: half the rank, for every tensor that is read: by q, k, v; gate, up; down.
    The down projection's is made of gate and up."""
    from hf_memopt.activations.compression import compression_of

    layers = compression_of(model).layers
    return sum(layer.basis.rank // 2 for n, layer in layers.items() if n.endswith(("q_proj", "gate_proj", "down_proj")))


def test_layerwise_holds_no_gradient_after_backward():
    build = llama(torch.bfloat16, **LAYERS)
    found = simulate.simulate(build, optimizer("compact_taco_adamw_layerwise"), tokens=TOKENS, granularity=1)
    assert found.after["backward"].components["gradients"] == 0
    assert found.phases["step"].components["gradients"] == 0


def test_compression_and_recomputation_hold_fewer_activations():
    """Inputs that are made again are not kept, compressed or not: with it, compression saves no more of them."""
    builders = (plain, optimizer("compact_adamw", recompute="none"), recomputing, optimizer("compact_adamw"))
    asked = {"tokens": TOKENS, "granularity": 1, "gradient_checkpointing": False, "loss": without_logits}
    held = [simulate.simulate(llama(torch.bfloat16, **LAYERS), b, **asked).after["forward"] for b in builders]
    activations = [moment.components["activations"] for moment in held]
    assert activations[0] > activations[1] > activations[2] == activations[3]


def without_logits(model, batch):
    return model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state.float().mean()
