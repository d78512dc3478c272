"""Which card a model fits on: weights, gradients, optimizer state and activations of a bf16 full fine-tuning.

    python -m tools.memory_budget             # the table
    python -m tools.memory_budget --readme    # writes it into the README

Nothing is typed by hand but the shapes of the models. They are built without memory; the optimizer state is what the
codecs declare for their parameters (the same declaration that allocates it), and activations are what the models'
own forward keeps for backward, run on tensors without storage.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.demo import table
from benchmarks.tables import replace_block
from hf_memopt import TacoAdamW, build_param_groups

ROOT = pathlib.Path(__file__).resolve().parent.parent
GIB = 2**30
TOKENS = 2048
CARDS_GIB = (8, 12, 16, 24, 32, 40, 48, 80)
RESERVE_GIB = 1.0
"""Of a card, for what no tensor accounts for: CUDA's context and libraries, fragments between allocations."""

# the published shapes of Llama 3.2 1B, Llama 3.2 3B and Llama 2 7B
MODELS = {
    "Llama 3.2 1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Llama 3.2 3B": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Llama 2 7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}


@dataclass(frozen=True)
class Budget:
    """Bytes, each component at its largest."""

    parameters: int
    weights: int
    gradients: int
    ternary_state: int
    adamw_state: int
    activations: int

    def total(self, state: int) -> int:
        return self.weights + self.gradients + state + self.activations


def budget(config: LlamaConfig, tokens: int = TOKENS) -> Budget:
    """Memory of a bf16 full fine-tuning with one sequence of ``tokens`` at a time and gradient checkpointing."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        weights = sum(p.nbytes for p in model.parameters())
        groups = build_param_groups(model, weight_decay=0.0, no_decay=())
        report = TacoAdamW(groups, kernel="reference").memory_report()
        whole = _kept_by_forward(model, tokens)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        kept = _kept_by_forward(model, tokens)
    layer = (sum(whole) - sum(kept)) // config.num_hidden_layers
    return Budget(
        parameters=report.parameters,
        weights=weights,
        gradients=weights,
        ternary_state=report.state_bytes,
        adamw_state=2 * weights,  # torch keeps both moments in the weights' dtype
        # on top of what is kept: a layer that is computed again, or the gradient of the logits, the largest tensor
        activations=sum(kept) + max(layer, max(kept)),
    )


def _kept_by_forward(model: torch.nn.Module, tokens: int) -> list[int]:
    """Bytes of each storage that forward and loss keep for backward, the model's own excluded."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: F841  (alive, with all that it keeps)
    return [storage.nbytes() for storage in kept.values()]


def smallest_card(nbytes: int) -> str:
    """The smallest of the usual cards with room for ``nbytes`` and the reserve."""
    fits = [c for c in CARDS_GIB if nbytes / GIB + RESERVE_GIB <= c]
    return f"{fits[0]} GB" if fits else f"over {CARDS_GIB[-1]} GB"


def rows() -> list[dict[str, str]]:
    cells = []
    for name, shape in MODELS.items():
        b = budget(LlamaConfig(**shape))
        for optim, state in (("taco_adamw", b.ternary_state), ("adamw_torch", b.adamw_state)):
            parts = {
                "weights": b.weights,
                "gradients": b.gradients,
                "optimizer state": state,
                "activations": b.activations,
                "sum": b.total(state),
            }
            cells.append(
                {"model": f"{name} ({b.parameters / 1e9:.2f}e9)", "optim": optim}
                | {part: f"{nbytes / GIB:.1f}" for part, nbytes in parts.items()}
                | {"smallest card": smallest_card(b.total(state))}
            )
    return cells


def readme_block() -> str:
    """The table and what it means."""
    return (
        f"{table(rows())}\n\nGiB, bf16 weights, one sequence of {TOKENS:,} tokens at a time, gradient checkpointing. "
        "Computed from the models' shapes, not measured on a card;\nthe parts are not all at their largest in the same "
        f"moment, and {RESERVE_GIB:g} GiB of the card is left for CUDA. "
        "Made by `python -m tools.memory_budget --readme`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    given = parser.parse_args()
    block = readme_block()
    print(block)
    if given.readme:
        path = ROOT / "README.md"
        text = replace_block(path.read_text(encoding="utf8"), "cards", block)
        partial = path.with_name("README.md.partial")
        partial.write_text(text, encoding="utf8")
        os.replace(partial, path)


if __name__ == "__main__":
    main()
