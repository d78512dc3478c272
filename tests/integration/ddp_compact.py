"""One rank of trainings with CompAct: ``torchrun --nproc-per-node N ddp_compact.py OUTPUT RESULT BATCH OPTIM...``."""

from __future__ import annotations

import sys

import torch
from tiny_llama import inner, snapshot, trainer

from hf_memopt import CompActCallback, CompActConfig
from hf_memopt.activations.compression import compression_of
from hf_memopt.activations.layers import CARRIER

STEPS, RATE = 3, 1e-2


def run(output: str, optim: str, size: int) -> dict:
    """A training of ``size`` sequences a step and process: weights and state, coordinates, losses and the first step's
    gradients of the carriers."""
    settings = {"optim_args": "rank=0.5,update_proj_gap=2"}
    if not optim.startswith("compact"):
        settings = {"callbacks": [CompActCallback(CompActConfig(rank=0.5, update_proj_gap=2))]}
    t = trainer(
        output,
        optim=optim,
        max_steps=STEPS,
        learning_rate=RATE,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        per_device_train_batch_size=size,
        save_strategy="no",
        **settings,
    )
    first: dict[str, torch.Tensor] = {}

    def remember(optimizer, args, kwargs) -> None:
        if not first:
            first.update({n: p.grad.clone() for n, p in t.model.named_parameters() if n.endswith(CARRIER)})

    inner(t.create_optimizer()).register_step_pre_hook(remember)
    t.train()
    return {
        "numbers": snapshot(t),
        "top": {basis.name: basis.top for basis in compression_of(t.model).bases()},
        "loss": [entry["loss"] for entry in t.state.log_history if "loss" in entry],
        "first": first,
        "world": t.args.world_size,
    }


def main(output: str, result: str, size: str, *optims: str) -> None:
    torch.set_num_threads(1)
    found = {optim: run(output, optim, int(size)) for optim in optims}
    torch.save(found, f"{result}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
