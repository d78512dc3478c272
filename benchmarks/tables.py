"""Tables and plots from the finished runs; nothing in them is typed by hand.

python -m benchmarks.tables             # benchmarks/results/quality/README.md and a plot for each task
python -m benchmarks.tables --readme    # also the generated parts of the repository's README.md
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
from collections import defaultdict
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.demo import rows, table

QUALITY = RESULTS / "quality"
DEMO = RESULTS / "demo"


def load(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text(encoding="utf8")) for p in sorted(folder.glob("*.json"))]


def by_strategy(results: list[dict[str, Any]]) -> dict[str, dict[float, list[dict[str, Any]]]]:
    """strategy -> learning rate -> its runs in the order of their seeds."""
    grouped: dict[str, dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for r in sorted(results, key=lambda r: (r["strategy"], r["lr"], r["seed"])):
        grouped[r["strategy"]][r["lr"]].append(r)
    return grouped


def best_rate(grid: dict[float, list[dict[str, Any]]]) -> float:
    """The rate with the best figure at seed 0, as the protocol chooses it."""
    return min(grid, key=lambda lr: min((r["after"] for r in grid[lr] if r["seed"] == 0), default=float("inf")))


def against_adamw(runs: list[dict[str, Any]], strategies: dict[str, dict[float, list[dict[str, Any]]]]) -> str:
    """Mean and range of the difference to adamw_torch on weights of the same dtype, seed by seed: the same batches."""
    baseline = next(
        (s for s, g in strategies.items() if s.partition("-")[0] == "adamw_torch" and plain(s, g, runs)), None
    )
    if baseline is None or runs[0]["strategy"] == baseline:
        return ""
    theirs = {r["seed"]: r["after"] for r in strategies[baseline][best_rate(strategies[baseline])]}
    gaps = [r["after"] - theirs[r["seed"]] for r in runs if r["seed"] in theirs]
    return f"{statistics.mean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})" if gaps else ""


def plain(strategy: str, grid: dict[float, list[dict[str, Any]]], runs: list[dict[str, Any]]) -> bool:
    """Whether a strategy has the dtype of `runs` and no other difference from its defaults in its name."""
    dtype = next(iter(grid.values()))[0]["dtype"]
    return dtype == runs[0]["dtype"] and strategy.count("-") == (dtype != "float32")


def summary(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    cells = []
    strategies = by_strategy(results)
    for strategy, grid in strategies.items():
        lr = best_rate(grid)
        runs = grid[lr]
        after = [r["after"] for r in runs]
        spread = f"{max(after) - min(after):.4f}" if len(after) > 1 else "one seed"
        rates = ", ".join(f"{rate:g}: {found['after']:.4f}" for rate, (found, *_) in sorted(grid.items()))
        cells.append(
            {
                "strategy": strategy,
                "best rate": f"{lr:g}",
                "seeds": str(len(after)),
                "before": f"{runs[0]['before']:.4f}",
                "after, mean": f"{statistics.mean(after):.4f}",
                "spread": spread,
                "against adamw_torch, same batches": against_adamw(runs, strategies),
                "state": f"{runs[0]['state_bytes'] / 1e6:,.1f} MB",
                "bits a parameter": f"{runs[0]['bits_per_parameter']:.2f}",
                "seconds a step": f"{statistics.median(r['step_seconds'] for r in runs):.2f}",
                "rates at seed 0": rates,
            }
        )
    return cells


def plot(task: str, results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Figure after training against the bytes of state: mean and range of the seeds at the best rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for strategy, grid in by_strategy(results).items():
        runs = grid[best_rate(grid)]
        after = [r["after"] for r in runs]
        mean = statistics.mean(after)
        error = [[mean - min(after)], [max(after) - mean]]
        axes.errorbar(runs[0]["bits_per_parameter"], mean, yerr=error, fmt="o", capsize=4, label=strategy)
    axes.set(xscale="log", xlabel="optimizer state, bits a parameter", ylabel=f"{results[0]['figure']} after training")
    ticks = [t for t in (1, 2, 4, 8, 16, 32, 64) if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title(f"{task}: mean and range of the seeds at each strategy's best rate", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def quality_page() -> str:
    lines = [
        "# Quality",
        "",
        "Generated by `python -m benchmarks.tables` from the JSON files in this folder. The tasks are described in the",
        "",
    ]
    lines[2] += " modules of the same name; `before` is the untrained model."
    for folder in sorted(p for p in QUALITY.iterdir() if p.is_dir()):
        results = [
            r
            for r in load(folder)
            if r["steps"] == r["training_arguments"]["max_steps"] and "-steps=" not in r["strategy"]
        ]
        if not results:
            continue
        plot(folder.name, results, QUALITY / f"{folder.name}.png")
        made = results[-1]
        lines += [f"## {folder.name}", "", table(summary(results)), "", f"![{folder.name}]({folder.name}.png)", ""]
        known = ", ".join(f"{k} {v}" for k, v in made["versions"].items())
        lines += [
            f"{made['steps']} steps, {made['machine']['cpu']}, {made['machine']['threads']} thread(s); {known}.",
            "",
        ]
    return "\n".join(lines)


def replace_block(text: str, name: str, content: str) -> str:
    """Put `content` between the markers of the generated block `name`. Raises ValueError when the markers are
    missing."""
    pattern = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md has no generated block {name!r}")
    return pattern.sub(lambda m: f"{m[1]}{content}\n{m[2]}", text)


def demo_block() -> str:
    """The recorded demo as the README shows it."""
    found = {r["optim"]: r for r in load(DEMO / "sotu-lm")}
    results = [found[name] for name in ("taco_adamw", "adamw_torch")]
    r = results[0]
    ran = f"torch {r['versions']['torch']}, transformers {r['versions']['transformers']}"
    where = f"{r['machine']['cpu']}, {r['machine']['threads']} threads, {ran}"
    what = f"SmolLM2-135M ({r['parameters']:,} parameters), {r['dtype']}, {r['steps']} steps of 2 x 256 tokens"
    note = f"{what}, the same batches; {where}."
    return f"{table(rows(results))}\n\n{note} Made by `make demo`.\n\n![demo](benchmarks/results/demo/demo.png)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--readme", action="store_true", help="fill the generated parts of README.md from the recorded demo"
    )
    given = parser.parse_args()
    page = quality_page()
    (QUALITY / "README.md").write_text(page, encoding="utf8")
    print(page)
    if given.readme:
        path = ROOT / "README.md"
        path.write_text(replace_block(path.read_text(encoding="utf8"), "demo", demo_block()), encoding="utf8")


if __name__ == "__main__":
    main()
