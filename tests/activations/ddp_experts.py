"""A rank of a training of which each process meets other layers: ``torchrun --nproc-per-node 2 ddp_experts.py OUT``."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt import CompActConfig, compress_activations

N, STEPS = 16, 4


class Expert(nn.Module):
    """gate and up read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(N, N) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        return sum((self.experts[i](x) for i in chosen), x)


def main(result: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), {}
    chosen = {0: [(0, 1), (0,), (0,), (0, 2)], 1: [(0,), (0, 1), (2,), (0, 1)]}[rank]
    for kind in ("principal", "structured"):
        torch.manual_seed(0)
        model = Experts()
        config = CompActConfig(rank=0.5, projection=kind, update_proj_gap=2, recompute="none")
        compression = compress_activations(model, config)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(STEPS):
            x = torch.randn(5, N, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            parallel(x, chosen[step]).square().mean().backward()
            optimizer.step()
        found[kind] = {"weights": model.state_dict(), "state": compression.state_dict()}
    torch.save(found, f"{result}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
