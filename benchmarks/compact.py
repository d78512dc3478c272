"""Evidence for CompAct: activation bytes, memory, seconds and loss beside checkpointing, recomputation and AdamW.

    python -m benchmarks.compact --activations   # bytes that forward leaves behind (benchmarks/compact_activations.py)
    python -m benchmarks.compact --memory        # peaks of full fine-tuning at 7B (benchmarks/compact_memory.py)
    python -m benchmarks.compact --steps-time    # seconds of a training step (benchmarks/compact_step.py)
    python -m benchmarks.compact --list          # the commands of benchmarks.quality that make the runs
    python -m benchmarks.compact --tables        # benchmarks/results/compact/README.md and its plot, from the JSON

What has a JSON file already is not measured again. The runs of quality follow `benchmarks/quality.py` and lie in
`benchmarks/results/compact/<task>/`; AdamW's are those of `benchmarks/results/quality/`.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from dataclasses import dataclass

from benchmarks import common, compact_activations, compact_memory, compact_step
from benchmarks.compact_activations import PROJECTIONS, RANKS
from benchmarks.quality import strategy_name

FOLDER = common.RESULTS / "compact"
QUALITY = common.RESULTS / "quality"
OURS, BASELINE = "compact_adamw", "adamw_torch"
BETA1 = 0.8
"""Of all runs: at so few steps AdamW itself does better with it than with 0.9."""
TASKS = ("llama-pretrain", "reviews-cls", "sotu-lm")
RECOMPUTE_NOTE = "# recompute= changes no gradient, so it has no runs of its own: its default is in all of these"


@dataclass(frozen=True)
class Run:
    """One strategy of the matrix."""

    rank: float
    projection: str

    @property
    def optim_args(self) -> str:
        return f"rank={self.rank:g},projection={self.projection}"

    @property
    def strategy(self) -> str:
        return strategy_name(OURS, "float32", BETA1, self.optim_args, 0)

    def command(self, task: str, folder: pathlib.Path = FOLDER) -> str:
        """How to make its runs: a grid of rates, then the seeds at the best one."""
        results = folder.relative_to(common.ROOT) if folder.is_relative_to(common.ROOT) else folder
        words = ["python", "-m", "benchmarks.quality", "--task", task, "--plan", OURS, "--beta1", f"{BETA1:g}"]
        return shlex.join([*words, "--optim-args", self.optim_args, "--results", str(results)])


MATRIX = [Run(rank, projection) for rank in RANKS for projection in PROJECTIONS]


def baseline_command(task: str) -> str:
    words = ["python", "-m", "benchmarks.quality", "--task", task, "--plan", BASELINE]
    return shlex.join([*words, "--beta1", f"{BETA1:g}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--activations", action="store_true", help="count what forward leaves behind")
    what.add_argument("--memory", action="store_true", help="simulate full fine-tuning at 7B")
    what.add_argument("--steps-time", action="store_true", help="measure training steps")
    what.add_argument("--list", action="store_true", help="print the commands of the runs")
    what.add_argument("--tables", action="store_true", help="write README.md and the plot")
    parser.add_argument("--model", nargs="+", choices=compact_activations.MODELS, help="of --activations; default: all")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS, help="of --list")
    parser.add_argument("--dtype", nargs="+", choices=compact_step.DTYPES, default=compact_step.DTYPES)
    parser.add_argument("--rounds", type=int, default=5, help="of --steps-time")
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER)
    given = parser.parse_args()
    if given.activations:
        compact_activations.run(given.results / "activations", given.model)
    elif given.memory:
        compact_memory.run(given.results / "memory")
    elif given.steps_time:
        compact_step.run(given.dtype, given.rounds, given.results)
    elif given.list:
        print(RECOMPUTE_NOTE, file=sys.stderr)
        for task in given.task:
            print(baseline_command(task))
            for run in MATRIX:
                print(run.command(task, given.results))
    else:
        from benchmarks.compact_page import page

        text = page(given.results)
        (given.results / "README.md").write_text(text, encoding="utf8")
        print(text)


if __name__ == "__main__":
    main()
