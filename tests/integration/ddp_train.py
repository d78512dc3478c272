"""One rank of a training on two processes: ``torchrun --nproc-per-node 2 ddp_train.py OUTPUT RESULT``."""

from __future__ import annotations

import sys

import torch
from tiny_llama import snapshot, trainer

import hf_memopt


def main(output: str, result: str) -> None:
    torch.set_num_threads(1)
    t = trainer(output, max_steps=4, per_device_train_batch_size=2, report_to=["hf_memopt"])
    t.train(resume_from_checkpoint=hf_memopt.last_complete_checkpoint(output))
    assert t.args.world_size == 2
    torch.save(snapshot(t), f"{result}.{t.args.process_index}")


if __name__ == "__main__":
    main(*sys.argv[1:])
