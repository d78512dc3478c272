"""The page and the plot of `benchmarks/fits.py`, from its JSON files alone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from benchmarks.demo import table
from benchmarks.fits import room_bytes

GIB, MIB = 2**30, 2**20
COLOURS = {
    "weights": "#555555",
    "gradients": "#e0a030",
    "activations": "#33658a",
    "backward temporaries": "#86bbd8",
    "optimizer state": "#c8102e",
    "optimizer temporaries": "#e58a97",
}
"""The components that the plot shows; buffers and the batch are too small to see."""


def load(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text(encoding="utf8")) for p in sorted(folder.glob("*.json"))]


def highest(record: dict[str, Any]) -> dict[str, Any]:
    """The peak of the reported iteration."""
    return record["memory"]["phases"][record["memory"]["peak_phase"]]


def label(case: dict[str, Any]) -> str:
    size = case["size"] if case["layers"] is None else f"{case['size']}, {case['layers']} layers"
    loss = f", loss {case['loss']}" if case["loss"] else ""
    return f"{case['optimizer']}, {size}, {case['tokens']} tokens{loss}"


def standard(records: list[dict[str, Any]], tokens: int = 2048) -> list[dict[str, Any]]:
    """The cases of one length and of whole models, smaller models first, larger peaks first."""
    chosen = [r for r in records if r["case"]["tokens"] == tokens and r["case"]["layers"] is None]
    return sorted(chosen, key=lambda r: (r["memory"]["parameters"], -r["memory"]["peak_bytes"]))


def rows(records: list[dict[str, Any]]) -> list[dict[str, str]]:
    cells = []
    for r in records:
        parts = highest(r)["components"]
        row = {"case": label(r["case"]), "peak, GiB": f"{r['memory']['peak_bytes'] / GIB:.2f}"}
        row |= {"at": r["memory"]["peak_phase"]}
        row |= {component: f"{parts[component] / GIB:.2f}" for component in COLOURS}
        row |= {f"peak of {p}": f"{m['nbytes'] / GIB:.2f}" for p, m in r["memory"]["phases"].items()}
        cells.append(row)
    return cells


def largest(record: dict[str, Any]) -> list[dict[str, str]]:
    """What is alive at the peak beside weights and optimizer state, by origin."""
    kinds = [k for k in record["memory"]["largest"] if k["component"] not in ("weights", "optimizer state")]
    return [
        {
            "made by": k["operation"],
            "component": k["component"],
            "shape": " x ".join(map(str, k["shape"])),
            "dtype": k["dtype"],
            "count": str(k["count"]),
            "MiB": f"{k['nbytes'] / MIB:,.0f}",
        }
        for k in kinds
    ]


def answers(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    cells = []
    for a in found:
        fits = a["fits"] is not None
        cells.append(
            {
                "question": a["what"],
                "optimizer": a["case"]["optimizer"],
                "card": f"{a['gib']} GB",
                "room, GiB": f"{a['room_bytes'] / GIB:.2f}",
                "fits": f"{a['fits']:,}" if fits else f"not even {a['smallest']:,}",
                "peak, GiB": f"{a['peak_bytes'] / GIB:.2f}",
                "does not": f"{a['next']:,}" if fits else "",
                "its peak": f"{a['next_peak_bytes'] / GIB:.2f}" if fits else "",
            }
        )
    return cells


CARDS_GIB = (8, 12, 16, 24, 32, 40, 48, 80)
PUBLISHED = {"1b": "Llama 3.2 1B", "3b": "Llama 3.2 3B", "7b": "Llama 2 7B", "13b": "Llama 2 13B"}


def smallest_card(nbytes: float, reserve: float) -> str:
    """The smallest of the usual cards with room for ``nbytes`` and a reserve of GiB."""
    fits = [c for c in CARDS_GIB if nbytes <= room_bytes(c, reserve)]
    return f"{fits[0]} GB" if fits else f"over {CARDS_GIB[-1]} GB"


def cards_block(folder: pathlib.Path, reserve: float) -> str:
    """The README's table of cards: whole models at 2048 tokens with transformers' own loss."""
    cells = []
    for r in standard(load(folder)):
        if r["case"]["loss"] or r["case"]["optimizer"] == "adamw-fp32-state":
            continue
        parts = highest(r)["components"]
        cells.append(
            {
                "model": f"{PUBLISHED[r['case']['size']]} ({r['memory']['parameters'] / 1e9:.2f}e9)",
                "`optim=`": f"`{r['case']['optimizer']}`",
                "weights": f"{parts['weights'] / GIB:.1f}",
                "gradients": f"{parts['gradients'] / GIB:.1f}",
                "optimizer": f"{(parts['optimizer state'] + parts['optimizer temporaries']) / GIB:.1f}",
                "activations": f"{(parts['activations'] + parts['backward temporaries']) / GIB:.1f}",
                "peak": f"{r['memory']['peak_bytes'] / GIB:.1f}",
                "card": smallest_card(r["memory"]["peak_bytes"], reserve),
            }
        )
    note = (
        "GiB at the peak of a training step: bf16 weights, one sequence of 2,048 tokens, gradient checkpointing. "
        "Simulated with the real code on tensors\nwithout storage, not measured on a card; 2.5 % of a card's memory "
        f"and {reserve:g} GiB are left for CUDA. Each row shows its own highest moment: without\ngradients that is "
        "the loss, whose fp32 logits then count as activations. [All cases](benchmarks/results/fits), made by "
        "`python -m benchmarks.fits --readme`."
    )
    return f"{table(cells)}\n\n{note}\n\n![bytes at the peak by component](benchmarks/results/fits/fits.png)"


def plot(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """One stacked bar a case: what is alive at its peak."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.5 * len(records) + 1.5), layout="constrained")
    names = [label(r["case"]) for r in records]
    left = [0.0] * len(records)
    for component, colour in COLOURS.items():
        widths = [highest(r)["components"][component] / GIB for r in records]
        axes.barh(names, widths, left=left, color=colour, label=component)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, total in enumerate(left):
        axes.text(total, i, f" {total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    for card in (16, 24, 32):
        axes.axvline(card, color="black", linewidth=0.7, linestyle=":")
    axes.set(xlabel="GiB at the peak; dotted: cards of 16, 24 and 32 GiB")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def write_page(folder: pathlib.Path) -> str:
    """Write `README.md` and `fits.png` into `folder`; returns the page."""
    records = load(folder)
    if not records:
        raise SystemExit(f"There is no result in {folder} yet: run `python -m benchmarks.fits` first.")
    shown = standard(records) or records
    plot(shown, folder / "fits.png")
    lines = [
        "# What fits on a card",
        "",
        "Generated by `python -m benchmarks.fits --tables` from the JSON files in this folder; what a case is stands",
        "in `benchmarks/fits.py`. Simulated, not measured on a GPU: two whole training iterations of the real code on",
        "tensors without storage, every storage counted in steps of 512 bytes. Not counted: the CUDA context,",
        "workspaces inside kernels, fragmentation. Components are those at the peak; `adamw-fp32-state` is AdamW with",
        "fp32 moments on bf16 weights, `adamw_torch` has its moments in bf16. With update in backward the peak is",
        "at the loss: transformers upcasts the logits, and tensors of tokens x vocabulary in fp32 stand beside the",
        "checkpoints.",
        "`loss chunked` (`benchmarks/chunked_loss.py`) computes the same loss without them.",
        "",
        table(rows(shown)),
        "",
        "![bytes at the peak by component](fits.png)",
        "",
    ]
    found = load(folder / "answers")
    if found:
        lines += ["## The largest that fits", "", table(answers(found)), ""]
    for r in shown:
        if r["case"]["optimizer"].endswith("_layerwise") and largest(r):
            lines += [f"## At the peak of {label(r['case'])}, beside weights and state", "", table(largest(r)), ""]
    made = ", ".join(f"{k} {v}" for k, v in records[-1]["versions"].items())
    revisions = ", ".join(sorted({r["revision"] for r in records}))
    lines += ["## Versions", "", f"{made}; revisions {revisions}.", ""]
    page = "\n".join(lines)
    (folder / "README.md").write_text(page, encoding="utf8")
    return page
