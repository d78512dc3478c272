"""The page and the plot of `benchmarks/optimizer_step.py`, from its JSON files alone."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from benchmarks.demo import table
from benchmarks.optimizers import ANCHORS, PEERS

MB = 1e6
FUSED, FOREACH, OURS = ANCHORS
HIGHLIGHT, PLAIN, TORCH = "#c8102e", "#33658a", "#555555"


def load(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The results, real sets before others, one thread before two."""
    found = [json.loads(p.read_text(encoding="utf8")) for p in folder.glob("*.json")]
    return sorted(found, key=lambda r: (-r["parameters"], r["dtype"] != "float32", r["machine"]["threads"]))


def measured(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The optimizers that ran, in the order of `PEERS`."""
    return {n: result["optimizers"][n] for n in PEERS if "seconds" in result["optimizers"].get(n, {})}


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def ratio(record: dict[str, Any], anchor: str) -> str:
    found = record["ratio"].get(anchor)
    return "1" if found is None else f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "optimizer": name,
            "a step, median": duration(r["seconds"]["median"]),
            "lowest - highest": f"{duration(r['seconds']['min'])} - {duration(r['seconds']['max'])}",
            "x foreach": ratio(r, FOREACH),
            "x fused": ratio(r, FUSED),
            "x TacoAdamW": ratio(r, OURS),
            "state": f"{r['state_bytes'] / MB:,.1f} MB",
            "bits a parameter": f"{r['bits_per_parameter']:.2f}",
            "temporaries": "" if r["temporaries_bytes"] is None else f"{r['temporaries_bytes'] / MB:,.0f} MB",
            "first step": duration(r["first_step_seconds"]),
            "rounds": str(r["rounds"]),
        }
        for name, r in sorted(measured(result).items(), key=lambda item: item[1]["seconds"]["median"])
    ]


def bandwidth(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Bytes that a step moves and how fast, beside the copy measured in the same rounds."""
    return [
        {
            "parameters": f"{result['what']}, {result['dtype']}, {threads(result)}",
            "optimizer": name,
            "bytes a parameter": f"{r['bytes_moved_a_parameter']:.1f}",
            "GB a second": f"{r['bytes_moved_a_second'] / 1e9:.1f}",
            "copy, GB a second": f"{r['copy_bytes_a_second'] / 1e9:.1f}",
        }
        for result in results
        for name, r in measured(result).items()
        if "bytes_moved_a_parameter" in r
    ]


def threads(result: dict[str, Any]) -> str:
    count = result["machine"]["threads"]
    return f"{count} thread{'s' * (count != 1)}"


def apart(wanted: list[float], gap: float) -> list[float]:
    """The sorted positions moved up and down as little as needed to be `gap` apart."""
    groups: list[list[float]] = []  # sum of (position - its offset in the group), count
    for position in wanted:
        groups.append([position, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] + gap * groups[-2][1] > groups[-1][0] / groups[-1][1]:
            last, count = groups.pop()
            groups[-1][0] += last - gap * groups[-1][1] * count
            groups[-1][1] += count
    return [total / count + gap * i for total, count in groups for i in range(int(count))]


def panel(axes: Any, result: dict[str, Any]) -> None:
    """One set and dtype: bytes of state against the time of a step, every point named at the right edge."""
    points = sorted(measured(result).items(), key=lambda item: item[1]["seconds"]["median"])
    x = [r["state_bytes"] / MB for _, r in points]
    y = [r["seconds"]["median"] for _, r in points]
    axes.set(xscale="log", yscale="log")
    low, high = min(x) / 1.6, max(x) * 1.6
    axes.set_xlim(low, high)
    axes.set_ylim(min(r["seconds"]["min"] for _, r in points) / 1.5, max(r["seconds"]["max"] for _, r in points) * 1.5)
    bottom, top = (math.log(limit) for limit in axes.get_ylim())
    places = apart([(math.log(t) - bottom) / (top - bottom) for t in y], 0.058)
    shift = max(0.0, places[-1] - 0.98) - max(0.0, 0.02 - places[0])
    for (name, r), at_x, at_y, place in zip(points, x, y, places, strict=True):
        color = HIGHLIGHT if name.startswith(OURS) else TORCH if name.startswith("torch ") else PLAIN
        error = [[at_y - r["seconds"]["min"]], [r["seconds"]["max"] - at_y]]
        axes.errorbar(at_x, at_y, yerr=error, fmt="o", color=color, capsize=3, markersize=6, zorder=3)
        axes.annotate(
            name,
            (at_x, at_y),
            xytext=(1.03, place - shift),
            textcoords="axes fraction",
            fontsize=8.5,
            color=color,
            fontweight="bold" if name == OURS else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.35, "shrinkA": 0, "shrinkB": 3},
        )
    axes.set_xlabel("optimizer state, MB")
    axes.set_ylabel("a step, seconds")
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.set_title(f"{result['what']}, {result['dtype']}, {threads(result)}", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """A panel for each set and dtype, with the smallest number of threads that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        if measured(result):
            chosen.setdefault((result["set"], result["dtype"]), result)
    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(6.8 * columns, 4.3 * lines), squeeze=False, layout="constrained"
    )
    for axes, result in zip(grid.flat, chosen.values(), strict=False):
        panel(axes, result)
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    figure.suptitle("One optimizer step: memory of the state and time (lower left is better)", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def page(results: list[dict[str, Any]]) -> str:
    lines = [
        "# One optimizer step",
        "",
        "Generated by `python -m benchmarks.optimizer_step --tables` from the JSON files in this folder. How it is",
        "measured stands in `benchmarks/optimizer_step.py`. Times are the median of the rounds; `x foreach`, `x fused`",
        "and `x TacoAdamW` are the ratio to that optimizer in the same process, round by round: median (lowest to",
        "highest). `first step` has what is done once: state, compilation, projectors. `state` counts whole storages.",
        "",
        "![time of a step against bytes of state](optimizer_step.png)",
        "",
    ]
    for result in results:
        size = f"{result['tensors']} tensors, {result['parameters']:,} parameters"
        lines += [f"## {result['what']}, {result['dtype']}, {threads(result)}", ""]
        ran = rows(result)
        lines += [f"{size}, {result['machine']['cpu']}.", "", table(ran) if ran else "Nothing ran.", ""]
        for name in PEERS:
            record = result["optimizers"].get(name, {})
            if "unavailable" in record:
                lines.append(f"- {name} did not run: {record['unavailable']}")
            elif record.get("note"):
                lines.append(f"- {name}: {record['note']}")
        lines.append("")
    moved = bandwidth(results)
    if moved:
        lines += ["## Memory traffic", ""]
        lines += [
            "Bytes that have to travel: weights and state read and written, the gradient read once, by TacoAdamW twice",
            "(its factors of the second moment come first; a small matrix is still in the cache then). `copy` is one",
            "copy of memory in the same rounds, read and write counted.",
            "",
            table(moved),
            "",
        ]
    lines += ["## Versions", ""]
    used = {(n, r["version"]) for result in results for n, r in measured(result).items()}
    packages = sorted({f"{PEERS[n].package} {v}" for n, v in used})
    revisions = sorted({r["revision"] for result in results for r in measured(result).values()})
    lines += [f"{', '.join(packages)}; revision {', '.join(revisions)}.", ""]
    return "\n".join(lines)


def write_page(folder: pathlib.Path) -> str:
    """Write `README.md` and `optimizer_step.png` into `folder`; returns the page. Raises FileNotFoundError when there
    are no results."""
    results = load(folder)
    if not any(measured(r) for r in results):
        raise FileNotFoundError(f"{folder} has no results: run python -m benchmarks.optimizer_step first")
    plot(results, folder / "optimizer_step.png")
    text = page(results)
    (folder / "README.md").write_text(text, encoding="utf8")
    return text
