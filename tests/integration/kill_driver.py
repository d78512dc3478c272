"""Kill real trainings with SIGKILL and let them go on.

    python kill_driver.py OPTIM[:OPTIM_ARGS] DTYPE SAVES OTHERS SEED FOLDER

Each training runs in a forked child (imports are made once) that resumes from ``last_complete_checkpoint`` and saves
after every step, keeping two checkpoints. The parent kills it, in turn, at any moment and while a checkpoint is being
written, until it gets through; its weights and optimizer state must then be those of the uninterrupted run, bit for
bit. Trainings follow each other until at least SAVES kills have left an unfinished checkpoint behind and OTHERS have
not. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_llama import differences, snapshot, tiny_llama, trainer

import hf_memopt
from hf_memopt.integrations.checkpoints import MARKER, why_not_whole

STEPS = 10


def train(output: Path, optim: str, dtype: str, result: Path) -> None:
    """Train to the end from the last whole checkpoint; ``result`` gets weights and state."""
    torch.set_num_threads(1)
    name, _, options = optim.partition(":")
    chosen = {"optim": name, "optim_args": options or None, "max_steps": STEPS}
    model = tiny_llama(getattr(torch, dtype), hidden_size=256, intermediate_size=512)
    last = hf_memopt.last_complete_checkpoint(output)
    if last and last.endswith(f"checkpoint-{STEPS}"):
        # killed after its last save: there is nothing left to train, and a resumed Trainer would take one step more
        t = trainer(output, model=type(model).from_pretrained(last, dtype=model.dtype), **chosen)
        t.create_optimizer()
        t.optimizer.load_state_dict(torch.load(os.path.join(last, "optimizer.pt"), weights_only=True))
    else:
        t = trainer(output, model=model, **chosen, save_steps=1, save_total_limit=2)
        t.train(resume_from_checkpoint=last)
    torch.save(snapshot(t), result.with_suffix(".tmp"))
    os.replace(result.with_suffix(".tmp"), result)


def start(output: Path, optim: str, dtype: str, result: Path) -> int:
    """Fork a training and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(output, optim, dtype, result)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def running(pid: int) -> bool:
    """Whether the child still runs, without taking its exit status."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def unfinished(output: Path) -> list[str]:
    return sorted(p.name for p in output.glob("checkpoint-*") if why_not_whole(p) is not None)


def wait_for_saves(pid: int, output: Path, count: int) -> None:
    """Return when ``count`` new checkpoint folders have been seen unmarked, or when the training has ended."""
    seen = {path.name for path in output.glob("checkpoint-*")}
    while running(pid):
        for path in output.glob("checkpoint-*"):
            if path.name not in seen:
                seen.add(path.name)
                count -= not (path / MARKER).exists()
                if count <= 0:
                    return


def main(optim: str, dtype: str, saves: int, others: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    os.waitpid(start(folder / "straight", optim, dtype, folder / "straight.pt"), 0)
    straight = torch.load(folder / "straight.pt")
    story = {
        "optim": optim,
        "dtype": dtype,
        "trainings": 0,
        "killed_in_a_save": 0,
        "killed_elsewhere": 0,
        "resumed_at": [],
        "differences": [],
    }
    while story["killed_in_a_save"] < saves or story["killed_elsewhere"] < others:
        story["trainings"] += 1
        output, result = folder / f"run{story['trainings']}", folder / f"run{story['trainings']}.pt"
        output.mkdir()
        aim_at_save = False
        resumed_at = []
        while True:
            last = hf_memopt.last_complete_checkpoint(output)
            resumed_at.append(int(last.rpartition("-")[2]) if last else 0)
            pid = start(output, optim, dtype, result)
            if aim_at_save:
                wait_for_saves(pid, output, rng.randrange(1, 4))
                time.sleep(rng.uniform(0, 0.03))
            else:
                time.sleep(rng.uniform(0.3, 2.5))
            aim_at_save = not aim_at_save
            if running(pid):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status):
                if os.WEXITSTATUS(status):
                    raise SystemExit(output.with_suffix(".log").read_text())
                break
            story["killed_in_a_save" if unfinished(output) else "killed_elsewhere"] += 1
        story["resumed_at"].append(resumed_at)
        story["differences"] += differences(straight, torch.load(result))
    print(json.dumps(story))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]), Path(sys.argv[6]))
