"""Quality of a strategy on a task: one training run, one JSON.

    python -m benchmarks.quality --task sotu-lm --optim taco_adamw --lr 1e-4 --seed 0 --dtype float32
    python -m benchmarks.quality --task sotu-lm --plan adamw_torch taco_adamw --dtype float32 bfloat16
    python -m benchmarks.quality --task sotu-lm --adapter lora --activation-memory exact --plan adamw_torch \\
        --dtype bfloat16

A run trains with the real Trainer and writes `benchmarks/results/quality/<task>/<strategy>@<lr>-<seed>.json`; the
strategy's name carries what differs from the defaults (`adamw_torch-bf16`, `adamw_torch-beta1=0.8`,
`adamw_torch-embedding_lr_scale=4`). A finished run is not repeated without `--force`.

A plan runs three learning rates at seed 0, then seeds 1 and 2 at the rate with the best figure, each in a process of
its own. The rates are the task's, or those of GRIDS for a method with another natural scale. It can be stopped at any
moment and called again: it goes on where it was.

With `--adapter` the base is frozen and adapters are trained (`benchmarks/lora_ways.py`), at rates of their own; results
then lie in `benchmarks/results/lora/<task>/`, and the strategy's name carries the way (`adamw_torch-bf16-lora-exact`).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from benchmarks.common import RESULTS, write_json
from benchmarks.lora_ways import ADAPTERS, PEFT, Way, adapted
from benchmarks.peers import APOLLO_TORCH, SGD_MOMENTUM, optimizer_arguments

# A further task is a further module with the same names as sotu_lm. `evaluate` gives the figure, or a dict with the
# figure under FIGURE and further ones; a `collate` of its own is for rows of unequal length.
TASKS = {
    "sotu-lm": "benchmarks.sotu_lm",
    "reviews-cls": "benchmarks.reviews_cls",
    "llama-pretrain": "benchmarks.llama_pretrain",
}
GRIDS: dict[str, dict[str, tuple[float, float, float]]] = {
    # scaled like AdamW's updates, but not averaged by a first moment: the same rates or smaller ones
    "adafactor": {
        "sotu-lm": (1e-5, 3e-5, 1e-4),
        "reviews-cls": (3e-5, 1e-4, 3e-4),
        "llama-pretrain": (5e-4, 1e-3, 2e-3),
    },
    # the gradient is clipped to a norm of 1, so a step is at most ten times the rate long
    SGD_MOMENTUM: {
        "sotu-lm": (1e-2, 3e-2, 1e-1),
        "reviews-cls": (1e-2, 3e-2, 1e-1),
        "llama-pretrain": (1e-1, 3e-1, 1.0),
    },
    # the channels of an update are scaled by norms over rank numbers instead of a whole row: half as long at rank 1/4
    **dict.fromkeys(
        ("apollo_adamw", APOLLO_TORCH),
        {
            "sotu-lm": (6e-5, 2e-4, 6e-4),
            "reviews-cls": (6e-5, 2e-4, 6e-4),
            "llama-pretrain": (2e-3, 4e-3, 8e-3),
        },
    ),
    # the rate is that of its AdamW part; how much more its one-sparse updates take is an option of its own
    "taco": {
        "sotu-lm": (3e-5, 1e-4, 3e-4),
        "reviews-cls": (3e-5, 1e-4, 3e-4),
        "llama-pretrain": (1e-3, 2e-3, 4e-3),
    },
}
"""Optimizer -> task -> learning rates, where the method's natural scale is not AdamW's."""
ADAPTER_RATES = (1e-4, 3e-4, 1e-3)
DTYPES = {"float32": "", "bfloat16": "-bf16", "float16": "-fp16"}
SEEDS = (0, 1, 2)


def strategy_name(
    optim: str,
    dtype: str,
    beta1: float,
    optim_args: str,
    steps: int,
    embedding_lr_scale: float = 1.0,
    way: Way | None = None,
) -> str:
    name = optim + DTYPES[dtype]
    if way is not None:
        name += f"-{way.name}"
    if beta1 != 0.9:
        name += f"-beta1={beta1:g}"
    if embedding_lr_scale != 1:
        name += f"-embedding_lr_scale={embedding_lr_scale:g}"
    if steps:
        name += f"-steps={steps}"
    return name + "".join(f"-{part.strip()}" for part in optim_args.split(",") if part.strip())


def result_path(given: argparse.Namespace, optim: str, dtype: str, lr: float, seed: int) -> pathlib.Path:
    more = given.steps, given.embedding_lr_scale, way_of(given)
    strategy = strategy_name(optim, dtype, given.beta1, given.optim_args, *more)
    return given.results / given.task / f"{strategy}@{lr:g}-{seed}.json"


def way_of(given: argparse.Namespace) -> Way | None:
    """How adapters are trained; None where all parameters are."""
    if given.adapter is None:
        return None
    return Way(given.adapter, given.activation_memory, given.gradient_checkpointing, given.lora_dropout)


def with_seed(optim: str, optim_args: str, seed: int) -> str:
    """A strategy of this package that rounds at random gets the run's seed, so that three seeds show its noise too."""
    from hf_memopt.registry import is_registered

    if not is_registered(optim) or "seed=" in optim_args:
        return optim_args
    return ",".join(filter(None, [optim_args, f"seed={seed}"]))


def rates(optim: str, task: Any, adapter: str | None = None) -> tuple[float, ...]:
    """The learning rates of a plan."""
    if adapter is not None:
        return ADAPTER_RATES
    return GRIDS.get(optim, {}).get(task.NAME, task.LEARNING_RATES)


def measured(task: Any, found: float | dict[str, float]) -> tuple[float, dict[str, float]]:
    """(the task's figure, further figures) of what its `evaluate` gave."""
    if not isinstance(found, dict):
        return found, {}
    return found[task.FIGURE], {key: value for key, value in found.items() if key != task.FIGURE}


def refuse_unused_beta1(optim: str, beta1: float, optimizer: Any) -> None:
    """A rate of decay in a strategy's name must be one that its optimizer has. Raises ValueError."""
    if any(group.get("betas", (None,))[0] != beta1 for group in optimizer.param_groups):
        raise ValueError(f"{optim} does not take --beta1 {beta1:g}: leave it out.")


def train(given: argparse.Namespace) -> dict[str, Any]:
    """One run from the untrained model to its figures."""
    import torch
    from transformers import PrinterCallback, TrainingArguments

    import hf_memopt  # noqa: F401  registers the names
    from benchmarks import common
    from benchmarks.embedding_lr import trainer_class
    from benchmarks.held_bytes import held_bytes

    task = importlib.import_module(TASKS[given.task])
    way = way_of(given)
    if way is None:
        model = task.load_model(getattr(torch, given.dtype), given.seed)
    else:
        model, _ = adapted(task.load_base(way, getattr(torch, given.dtype)), way, given.seed)
    optim_args = with_seed(given.optim, given.optim_args, given.seed)
    chosen = optimizer_arguments(given.optim, optim_args, lr=given.lr, beta1=given.beta1, model=model)
    for_trainer = chosen.pop("trainer")
    steps = given.steps or task.STEPS
    # new adapters change nothing, but what is kept of untrained models is of those without quantisation and upcasts
    before, more_before = measured(task, (task.evaluate_before if way is None else task.evaluate)(model))
    fixed = task.training_arguments(steps)
    clock = common.StepClock()
    seen = hashlib.sha256()
    blocks = task.training_blocks(given.seed, steps)

    def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
        if hasattr(task, "collate"):
            return task.collate(rows)
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = together(rows)
        for key in sorted(batch):
            seen.update(batch[key].numpy().tobytes())
        return batch

    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=scratch,
            learning_rate=given.lr,
            adam_beta1=given.beta1,
            seed=given.seed,
            data_seed=given.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            disable_tqdm=True,
            **chosen,
            **fixed,
        )
        trainer = trainer_class(given.embedding_lr_scale)(
            model=model,
            args=args,
            train_dataset=blocks,
            data_collator=collate,
            callbacks=[clock, common.Bar(given.optim)],
            **for_trainer,
        )
        trainer.remove_callback(PrinterCallback)
        if given.beta1 != 0.9:
            refuse_unused_beta1(given.optim, given.beta1, trainer.create_optimizer())
        common.reset_peak_memory()
        trainer.train()
    peak = common.peak_memory_bytes()
    model.train()
    batch = {key: value.to(model.device) for key, value in together(blocks[: args.train_batch_size]).items()}
    held, _ = held_bytes(model, lambda: model(**batch).loss)
    after, more_after = measured(task, task.evaluate(model))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        "task": given.task,
        "figure": task.FIGURE,
        "strategy": strategy_name(
            given.optim, given.dtype, given.beta1, given.optim_args, given.steps, given.embedding_lr_scale, way
        ),
        "adapter": None if way is None else asdict(way),
        "optim": given.optim,
        "optimizer_class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "optim_args": optim_args,
        "param_groups": common.hyperparameters(inner),
        "kernel": inner.kernel_name() if hasattr(inner, "kernel_name") else None,
        "lr": given.lr,
        "embedding_lr_scale": given.embedding_lr_scale,
        "beta1": given.beta1,
        "seed": given.seed,
        "dtype": given.dtype,
        "steps": steps,
        "training_arguments": fixed,
        "before": before,
        "after": after,
        "more": {key: {"before": more_before[key], "after": more_after[key]} for key in more_after},
        "curve": clock.losses,
        "grad_norms": clock.grad_norms,
        "batches_sha256": seen.hexdigest(),
        "parameters": trainable,
        "weight_bytes": common.storage_bytes([p.detach() for p in model.parameters()]),
        "gradient_bytes": clock.gradient_bytes,
        "activation_bytes": held,
        "state_bytes": clock.state_bytes,
        "bits_per_parameter": 8 * clock.state_bytes / trainable,
        "skipped_steps": getattr(inner, "skipped_steps", 0),
        "peak_memory_bytes": peak,
        "step_seconds": statistics.median(clock.step_seconds),
        "optimizer_seconds": statistics.median(clock.optimizer_seconds),
        "versions": common.versions(),
        "machine": common.machine(),
        "git_revision": common.git_revision(),
        "source_digest": common.source_digest(),
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, from its file if it has been done. Raises ValueError when the figure is not a finite
    number."""
    path = result_path(given, given.optim, given.dtype, given.lr, given.seed)
    if path.is_file() and not given.force:
        return json.loads(path.read_text(encoding="utf8"))
    result = train(given)
    if not math.isfinite(result["after"]):
        raise ValueError(f"{path.stem}: the {result['figure']} after training is {result['after']}")
    write_json(path, result)
    return result


def describe(result: dict[str, Any]) -> str:
    more = "".join(
        f"{name} {value['before']:.3f} -> {value['after']:.3f}, " for name, value in result.get("more", {}).items()
    )
    return (
        f"{result['strategy']}@{result['lr']:g}-{result['seed']}: "
        f"{result['figure']} {result['before']:.4f} -> {result['after']:.4f}, {more}"
        f"{result['bits_per_parameter']:.3f} bits a parameter, {result['step_seconds']:.2f} s a step"
    )


def run_apart(given: argparse.Namespace, optim: str, dtype: str, lr: float, seed: int) -> dict[str, Any]:
    """`run` in a fresh process, so that one run's memory is not counted in the next one's peak."""
    path = result_path(given, optim, dtype, lr, seed)
    if not path.is_file() or given.force:
        command = [sys.executable, "-m", "benchmarks.quality", "--task", given.task, "--optim", optim, "--lr", repr(lr)]
        command += [
            "--seed",
            str(seed),
            "--dtype",
            dtype,
            "--beta1",
            repr(given.beta1),
            "--optim-args",
            given.optim_args,
        ]
        command += ["--embedding-lr-scale", repr(given.embedding_lr_scale)]
        if given.adapter is not None:
            command += ["--adapter", given.adapter, "--activation-memory", given.activation_memory]
            command += ["--lora-dropout", repr(given.lora_dropout)]
            command += ["--gradient-checkpointing"] if given.gradient_checkpointing else []
        command += ["--steps", str(given.steps), "--results", str(given.results)] + (["--force"] if given.force else [])
        done = subprocess.run(command, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"the plan stops: the run {path.stem} failed")
    result = json.loads(path.read_text(encoding="utf8"))
    print(describe(result), flush=True)
    return result


def plan(given: argparse.Namespace) -> None:
    task = importlib.import_module(TASKS[given.task])
    for dtype in given.dtype:
        for optim in given.plan:
            chosen = given.lr or rates(optim, task, given.adapter)
            grid = [run_apart(given, optim, dtype, lr, SEEDS[0]) for lr in chosen]
            best = min(grid, key=lambda result: result["after"])["lr"]
            for seed in SEEDS[1:]:
                run_apart(given, optim, dtype, best, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="sotu-lm")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--optim", help="one run of this optimizer")
    what.add_argument("--plan", nargs="+", metavar="OPTIM", help="the grid and the three seeds of these optimizers")
    parser.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="learning rate of the run, or the rates of the plan (default: GRIDS, else the task's)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["float32"], help="dtype of the weights")
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument(
        "--embedding-lr-scale",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="embedding and output head learn at this many times the rate",
    )
    parser.add_argument("--optim-args", default="", help="as in TrainingArguments.optim_args")
    parser.add_argument(
        "--steps", type=int, default=0, help="another number of steps than the task's (not for published figures)"
    )
    parser.add_argument("--adapter", choices=ADAPTERS, help="train adapters on a frozen base, quantised for qlora")
    parser.add_argument("--activation-memory", default=PEFT, metavar="WAY", help="of --adapter: lora_ways.py")
    parser.add_argument("--lora-dropout", type=float, default=0.0, help="of --adapter")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="of --adapter")
    parser.add_argument("--results", type=pathlib.Path, help="folder of the results; default: results/quality, or lora")
    parser.add_argument("--force", action="store_true", help="repeat finished runs")
    given = parser.parse_args()
    if given.adapter is None and (given.activation_memory, given.lora_dropout) != (PEFT, 0.0):
        parser.error("--activation-memory and --lora-dropout are of --adapter")
    if given.adapter is None and given.gradient_checkpointing:
        parser.error("--gradient-checkpointing is of --adapter")
    if given.adapter is not None and given.task != "sotu-lm":
        parser.error("--adapter is for --task sotu-lm")
    given.results = given.results or RESULTS / ("quality" if given.adapter is None else "lora")
    if given.plan:
        plan(given)
        return
    if len(given.lr or ()) != 1 or len(given.dtype) != 1:
        parser.error("one run takes exactly one --lr and one --dtype")
    given.lr, given.dtype = given.lr[0], given.dtype[0]
    print(describe(run(given)), flush=True)


if __name__ == "__main__":
    main()
