"""The command ``hf-memopt``.

hf-memopt list            table of the optimizers
hf-memopt list --json     the same for programs
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from .parsing import describe_options
from .registry import OptimizerSpec, list_optimizers

INDENT = "    "
HELD = "\u00a0"  # a space at which no line is broken
MIN_COLUMNS = 70  # what the longest option needs


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Wrong arguments end in argparse's message and status 2."""
    import hf_memopt

    parser = argparse.ArgumentParser(prog="hf-memopt", description="Optimizer memory for the Hugging Face Trainer.")
    parser.add_argument("--version", action="version", version=f"hf_memopt {hf_memopt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    listing = commands.add_parser("list", help="list the optimizers, with their options")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=lambda args: print(to_json() if args.json else table()))
    with quiet_when_nobody_reads(parser.prog):
        args = parser.parse_args(argv)
        args.run(args)
    return 0


@contextlib.contextmanager
def quiet_when_nobody_reads(program: str) -> Iterator[None]:
    """Around what prints: ends with status 1, without a traceback, where the output cannot be written.

    Silently if the reader has gone (``hf-memopt list | head -1``), else with one sentence (a full disk).
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # here, not at the interpreter's end, where nothing can be caught
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            # what is still buffered must have somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: the output could not be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(1) from None


def table(columns: int | None = None) -> str:
    """The optimizers as text: name and summary, below it options, source and documentation.

    Lines are at most ``columns`` wide, by default the terminal's width (80 where there is none) but at least
    ``MIN_COLUMNS``; an option stands on one line.
    """
    columns = max(MIN_COLUMNS, columns or shutil.get_terminal_size().columns)
    lines = []
    for spec in list_optimizers():
        lines += _wrapped(f"{spec.name}  {spec.summary}", columns, "", INDENT)
        options = describe_options(spec.options).removeprefix("the options are ")
        details = {
            "optim_args": ", ".join(option.replace(" ", HELD) for option in options.split(", ")),
            "source": spec.paper,
            "docs": spec.docs,
        }
        for label, text in details.items():
            lines += _wrapped(f"{label}: {text}", columns, INDENT, 2 * INDENT)
    return "\n".join(lines)


def _wrapped(text: str, columns: int, first: str, others: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(HELD, " ") for line in lines]


def to_json() -> str:
    """The optimizers as a JSON list of name, summary, paper, docs and options with their defaults."""
    return json.dumps([_as_dict(spec) for spec in list_optimizers()], indent=2)


def _as_dict(spec: OptimizerSpec) -> dict:
    options = {field.name: field.default for field in dataclasses.fields(spec.options)}
    return {"name": spec.name, "summary": spec.summary, "paper": spec.paper, "docs": spec.docs, "options": options}


if __name__ == "__main__":
    sys.exit(main())
