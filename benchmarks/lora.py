"""Evidence for LoRA and QLoRA: activation bytes, peak, seconds and loss beside PEFT, VeLoRA and checkpointing.

    python -m benchmarks.lora --activations   # bytes that forward leaves behind (benchmarks/lora_activations.py)
    python -m benchmarks.lora --memory        # simulated peak of Llama-3-8B (benchmarks/lora_memory.py)
    python -m benchmarks.lora --steps-time    # seconds of a training step (benchmarks/lora_step.py)
    python -m benchmarks.lora --list          # the commands of benchmarks.quality that make the runs of sotu-lm
    python -m benchmarks.lora --tables        # benchmarks/results/lora/README.md and its plot, from the JSON

What has a JSON file already is not measured again. The ways to train are those of `benchmarks/lora_ways.py`; the runs
of quality follow `benchmarks/quality.py` and lie in `benchmarks/results/lora/sotu-lm/`.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex

from benchmarks import common, lora_activations, lora_memory, lora_step
from benchmarks.lora_ways import EXACT, NARROW, NO_UPCAST, PEFT, VELORA, Way
from benchmarks.quality import strategy_name

FOLDER = common.RESULTS / "lora"
TASK, OPTIMIZER, DTYPE = "sotu-lm", "adamw_torch", "bfloat16"
COMPRESSED = [f"compressed:{rank:g}{more}" for rank in (0.25, 0.125) for more in ("", ":none")]
MATRIX = [
    *(Way("lora", memory) for memory in (PEFT, NARROW, VELORA, EXACT, *COMPRESSED)),
    *(Way("qlora", memory) for memory in (PEFT, NO_UPCAST, NARROW, EXACT, *COMPRESSED)),
]
"""Checkpointing and recomputation of an exact input change no gradient, so they have no runs of their own."""


def strategy(way: Way) -> str:
    """The name of its runs."""
    return strategy_name(OPTIMIZER, DTYPE, 0.9, "", 0, way=way)


def command(way: Way, folder: pathlib.Path = FOLDER) -> str:
    """How to make its runs: a grid of rates, then the seeds at the best one."""
    results = folder.relative_to(common.ROOT) if folder.is_relative_to(common.ROOT) else folder
    words = ["python", "-m", "benchmarks.quality", "--task", TASK, "--plan", OPTIMIZER, "--dtype", DTYPE]
    words += ["--adapter", way.adapter, "--activation-memory", way.memory, "--results", str(results)]
    return shlex.join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--activations", action="store_true", help="count what forward leaves behind")
    what.add_argument("--memory", action="store_true", help="simulate the peak of Llama-3-8B")
    what.add_argument("--steps-time", action="store_true", help="measure training steps")
    what.add_argument("--list", action="store_true", help="print the commands of the runs")
    what.add_argument("--tables", action="store_true", help="write README.md and the plot")
    parser.add_argument("--model", nargs="+", choices=lora_activations.MODELS, help="of --activations; default: all")
    shapes = list(lora_step.SHAPES)
    parser.add_argument("--shape", nargs="+", choices=shapes, default=shapes, help="of --steps-time")
    parser.add_argument("--dtype", nargs="+", choices=lora_step.DTYPES, default=lora_step.DTYPES)
    parser.add_argument("--rounds", type=int, default=5, help="of --steps-time")
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER)
    given = parser.parse_args()
    if given.activations:
        lora_activations.run(given.results / "activations", given.model)
    elif given.memory:
        lora_memory.run(given.results / "memory")
    elif given.steps_time:
        lora_step.run(given.shape, given.dtype, given.rounds, given.results)
    elif given.list:
        print("\n".join(command(way, given.results) for way in MATRIX))
    else:
        from benchmarks.lora_page import page

        text = page(given.results)
        (given.results / "README.md").write_text(text, encoding="utf8")
        print(text)


if __name__ == "__main__":
    main()
