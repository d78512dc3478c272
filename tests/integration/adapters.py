"""Tiny models with real PEFT adapters, the same numbers on every call, and what one backward pass of them keeps."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from tests.integration.tiny_llama import VOCABULARY, tiny_llama

IDS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


def adapted(model=None, dtype=torch.float32, *, upcast=True, shape=None, **lora):
    """A ``PeftModel`` in train mode with random adapters in every linear layer; ``lora`` are LoraConfig's."""
    model = tiny_llama(dtype, **(shape or {})) if model is None else model
    torch.manual_seed(3)
    config = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, **lora}
    model = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=upcast)
    model.enable_input_require_grads()
    return model.train()


def step(model, ids=IDS):
    """(loss, gradients by name, bytes of the distinct storages that autograd kept beside parameters)."""
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(input_ids=ids, labels=ids).loss
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = sum(size for key, size in kept.items() if key not in parameters)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, held


def assert_same(a, b):
    """The losses and all gradients are bit for bit the same."""
    assert torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys()
    differing = [name for name in a[1] if not torch.equal(a[1][name], b[1][name])]
    assert not differing


def logits(model, ids=IDS):
    """In evaluation, without grad; the mode is put back."""
    training = model.training
    with torch.no_grad():
        result = model.eval()(input_ids=ids).logits
    model.train(training)
    return result
