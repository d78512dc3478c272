"""The demo: fine-tune a real model twice on the same batches, with `taco_adamw` and with `adamw_torch`, and compare.

    make demo          (or: python -m benchmarks.demo)

SmolLM2-135M, all parameters, State of the Union addresses; the figure is the loss on whole addresses that neither run
has seen (the task `sotu-lm`, shortened so that both runs fit in ten minutes on two cores). Ends with a table and
`output/demo/demo.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import ROOT

STRATEGIES = ("taco_adamw", "adamw_torch")
STEPS = 36
LEARNING_RATE = 1e-4
SMOOTHED = 8
"""Steps of 2 texts are averaged for the curve: single ones differ more from each other than training changes them."""
MB = 1e6


def rows(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The demo's table, a dictionary a strategy, heading -> cell."""
    return [
        {
            "optim": r["optim"],
            "held-out loss before": f"{r['before']:.3f}",
            "after": f"{r['after']:.3f}",
            "optimizer state": f"{r['state_bytes'] / MB:,.1f} MB",
            "bits a parameter": f"{r['bits_per_parameter']:.2f}",
            "peak memory": f"{r['peak_memory_bytes'] / MB:,.0f} MB",
            "seconds a step": f"{r['step_seconds']:.2f}",
            "of which optimizer": f"{r['optimizer_seconds'] / r['step_seconds']:.1%}",
        }
        for r in results
    ]


def table(cells: list[dict[str, str]]) -> str:
    """Markdown with aligned columns, readable in a terminal as it is."""
    heads = list(cells[0])
    width = {h: max(len(h), *(len(c[h]) for c in cells)) for h in heads}

    def line(values: list[str]) -> str:
        first, *rest = (
            v.ljust(width[h]) if h == heads[0] else v.rjust(width[h]) for h, v in zip(heads, values, strict=True)
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (width[h] + 1) + ("-" if h == heads[0] else ":") for h in heads) + "|"
    return "\n".join([line(heads), rule, *(line([c[h] for h in heads]) for c in cells)])


def running_mean(values: list[float], width: int = SMOOTHED) -> list[float]:
    """Mean of the last ``width`` values at each step; of those there are at the beginning."""
    return [statistics.mean(values[max(0, i - width) : i]) for i in range(1, len(values) + 1)]


def plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Left: loss of each step (points), its running mean, and the held-out loss. Right: bytes held through training, by
    component."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colour = {"taco_adamw": "#d1495b", "adamw_torch": "#30638e"}
    # the second curve lies on the first: a thin dark line on a broad light one keeps both visible
    look = {"taco_adamw": {"lw": 1.6, "zorder": 3}, "adamw_torch": {"lw": 4.5, "alpha": 0.35, "zorder": 2}}
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.25, 1), layout="constrained")
    for r in results:
        steps, drawn = range(1, len(r["curve"]) + 1), {"color": colour[r["optim"]], **look[r["optim"]]}
        left.scatter(steps, r["curve"], color=drawn["color"], s=12, alpha=0.3, linewidths=0, zorder=1)
        left.plot(steps, running_mean(r["curve"]), label=f"{r['optim']}, training, mean of {SMOOTHED} steps", **drawn)
    for r, marker, size in zip(results, "ox", (70, 55), strict=True):
        style = {"color": colour[r["optim"]], "marker": marker, "s": size, "zorder": 4, "linewidths": 2}
        left.scatter([0, r["steps"]], [r["before"], r["after"]], label=f"{r['optim']}, held out", **style)
        up = r["after"] == max(other["after"] for other in results)
        left.annotate(
            f"{r['after']:.3f}",
            (r["steps"], r["after"]),
            xytext=(9, 3 if up else -11),
            textcoords="offset points",
            color=colour[r["optim"]],
        )
    start = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    left.annotate(f"{results[0]['before']:.3f}", (0, results[0]["before"]), **start)
    left.set_xlim(-0.13 * results[0]["steps"], 1.12 * results[0]["steps"])
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="step", ylabel="loss (nats a token)")
    left.set_title(f"SmolLM2-135M on State of the Union addresses, {results[0]['dtype']}", loc="left", fontsize=11)
    left.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))

    parts = {"weights": "weight_bytes", "gradients": "gradient_bytes", "optimizer state": "state_bytes"}
    shade = {"weights": "#8d99ae", "gradients": "#c9cfd9", "optimizer state": "#edae49"}
    begins = [0.0] * len(results)
    for part, key in parts.items():
        sizes = [r[key] / MB for r in results]
        bars = right.barh([r["optim"] for r in results], sizes, left=begins, color=shade[part], height=0.55, label=part)
        for bar, size, begin in zip(bars, sizes, begins, strict=True):
            inside = size > 0.12 * max(sum(r[k] for k in parts.values()) / MB for r in results)
            x = begin + size / 2 if inside else begin + size
            text = f"{size:,.0f}" if inside else f" {size:,.0f} MB of optimizer state"
            right.text(
                x, bar.get_y() + bar.get_height() / 2, text, ha="center" if inside else "left", va="center", fontsize=9
            )
        begins = [a + b for a, b in zip(begins, sizes, strict=True)]
    right.set(xlabel="MB")
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.set_ylim(len(results) - 0.45, -0.55)
    right.set_title("Memory held through training", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "output" / "demo")
    given = parser.parse_args()

    began = time.monotonic()
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    for earlier in (given.output / "sotu-lm").glob("*.json"):
        earlier.unlink()
    results = []
    for number, optim in enumerate(STRATEGIES, 1):
        print(f"[{number}/{len(STRATEGIES)}] optim={optim!r}: {given.steps} steps of 2 x 256 tokens", flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks.quality",
            "--task",
            "sotu-lm",
            "--optim",
            optim,
            "--lr",
            repr(LEARNING_RATE),
        ]
        command += ["--dtype", given.dtype, "--steps", str(given.steps), "--results", str(given.output), "--force"]
        done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"error: the run with optim={optim!r} failed; its message stands above")
        (written,) = (given.output / "sotu-lm").glob(f"{optim}*.json")
        results.append(json.loads(written.read_text(encoding="utf8")))
    if results[0]["batches_sha256"] != results[1]["batches_sha256"]:
        raise SystemExit("error: the two runs saw different batches, so their losses cannot be compared")

    text = table(rows(results))
    picture = given.output / "demo.png"
    plot(results, picture)
    (given.output / "demo.md").write_text(text + "\n", encoding="utf8")
    shown = os.path.relpath(picture)
    print(f"\n{text}\n\nplot: {shown}\n{time.monotonic() - began:.0f} s, the same {given.steps} batches for both")


if __name__ == "__main__":
    main()
