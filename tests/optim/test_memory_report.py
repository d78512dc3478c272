"""Bytes: what is reported is what is there, and it is as little as promised."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import TacoAdamW
from hf_memopt.optim.report import GroupRow, MemoryReport, human_bytes
from hf_memopt.param_groups import build_param_groups
from tests.cases import SHAPES, dtype_cases, parameter
from tests.optim.common import train

# the architecture of SmolLM2-135M, from its published config.json
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def real_bytes(optimizer: TacoAdamW) -> int:
    """Distinct storages of all state tensors, counted without the package's help."""
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(storages.values())


def groups_of(model) -> list[dict]:
    no_decay = [name for name, p in model.named_parameters() if p.dim() < 2]
    return build_param_groups(model, weight_decay=0.1, no_decay=no_decay)


def llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SMOLLM2_135M, **changes}))


@pytest.mark.parametrize(**dtype_cases())
def test_declared_equals_measured(kernel, dtype):
    """Over all odd shapes, before the first step and after, in ternary and dense."""
    for treatment in ("ternary", "dense", "auto"):
        items = [(f"p{i}", parameter(*shape, dtype=dtype)) for i, shape in enumerate(SHAPES.values())]
        optimizer = TacoAdamW([{"params": items, "treatment": treatment}], kernel=kernel)
        declared = optimizer.memory_report()
        train(optimizer, range(1))
        measured = optimizer.memory_report()
        assert not declared.measured and measured.measured
        assert declared.rows == measured.rows
        assert measured.state_bytes == real_bytes(optimizer)
        assert measured.parameters == sum(p.numel() for _, p in items)


def test_storages_do_not_grow(kernel):
    """Later steps, a skipped one, loading and copying leave nothing behind in the state."""
    p = parameter(64, 161, dtype=torch.bfloat16)
    optimizer = TacoAdamW([p], kernel=kernel)
    train(optimizer, range(1))
    nbytes = real_bytes(optimizer)
    train(optimizer, range(3))
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, range(2))
    assert real_bytes(optimizer) == nbytes == optimizer.memory_report().state_bytes


def test_a_4096_square_matrix(kernel):
    p = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=torch.bfloat16))
    optimizer = TacoAdamW([p], kernel=kernel)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert 8 * real_bytes(optimizer) / p.numel() <= 3.35


def test_smollm2_135m_declared():
    """All its parameters, on the meta device."""
    with torch.device("meta"):
        model = llama()
    report = TacoAdamW(groups_of(model), kernel="reference").memory_report()
    assert report.parameters == sum(p.numel() for p in model.parameters()) == 134515008
    assert report.bits_per_parameter <= 3.45


def test_smollm2_135m_scaled_down_measured(kernel):
    """Two of its thirty layers and a twelfth of its vocabulary, real tensors: the declaration on meta holds to the
    byte. The vectors weigh no more here than there.
    """
    changes = {"num_hidden_layers": 2, "vocab_size": 4096}
    with torch.device("meta"):
        declared = TacoAdamW(groups_of(llama(**changes)), kernel="reference").memory_report()
    optimizer = TacoAdamW(groups_of(llama(**changes).bfloat16()), kernel=kernel)
    train(optimizer, range(1))
    report = optimizer.memory_report()
    assert report.rows == declared.rows and report.state_bytes == real_bytes(optimizer)
    assert report.bits_per_parameter <= 3.45


def test_rows_say_why():
    model = llama(num_hidden_layers=1, vocab_size=128)
    model.model.embed_tokens.requires_grad_(False)
    no_decay = [name for name, p in model.named_parameters() if p.dim() < 2]
    groups = build_param_groups(model, weight_decay=0.1, no_decay=no_decay, target_modules=["mlp"])
    optimizer = TacoAdamW(groups, kernel="reference")
    report = optimizer.memory_report(model)
    rows = {(row.treatment, row.reason, row.weight_decay): row for row in report.rows}
    assert set(rows) == {
        ("ternary", "matrix", 0.1),
        ("dense", "vector", 0.0),
        ("dense", "not in optim_target_modules", 0.1),
    }
    assert rows["ternary", "matrix", 0.1].tensors == 3
    assert report.frozen_parameters == 128 * 576
    assert rows["dense", "vector", 0.0].bits_per_parameter >= 64

    table = report.table()
    for text in (
        "ternary",
        "dense",
        "vector",
        "not in optim_target_modules",
        "frozen",
        "declared",
        "kernel reference",
        f"{report.parameters:,}",
    ):
        assert text in table
    assert len({len(line) for line in table.splitlines()[1:]}) == 1, "columns are aligned"


def test_as_dict_is_json():
    report = TacoAdamW([parameter(64, 161), parameter(9)], kernel="reference").memory_report()
    back = json.loads(json.dumps(report.as_dict()))
    assert back["state_bytes"] == report.state_bytes == sum(row["state_bytes"] for row in back["rows"])
    assert back["bits_per_parameter"] == report.bits_per_parameter and back["kernel"] == "reference"


def test_an_empty_report():
    report = MemoryReport("X", "reference", (), True)
    assert report.bits_per_parameter == 0.0 and report.state_bytes == 0 and "total" in report.table()
    assert GroupRow("dense", "vector", 0.0, 1, 0, 4).bits_per_parameter == 0.0


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**60, "1048576.00 TiB"),
    ],
)
def test_human_bytes(n, text):
    assert human_bytes(n) == text
