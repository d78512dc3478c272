"""The command ``hf-memopt``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import hf_memopt
from hf_memopt.cli import main


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_list(capsys, monkeypatch, columns):
    """Everything is there, and no line is wider than the terminal, down to what an option needs."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for line in out.splitlines():
        assert len(line) <= max(columns, 70), line
    text = " ".join(out.split())
    for spec in hf_memopt.list_optimizers():
        assert f"{spec.name} {spec.summary}" in text and spec.docs in text
        assert f"\n{spec.name}  " in f"\n{out}", "a name begins its line"
    assert "kernel: auto|reference|compiled|triton|inductor = auto," in out, "an option stays on one line"
    assert "seed: int = 0, stochastic_rounding: true|false = true" in text


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == [spec.name for spec in hf_memopt.list_optimizers()]
    assert listed[0]["options"]["kernel"] == "auto"


@pytest.mark.parametrize("arguments", [[], ["lst"], ["list", "--yaml"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "hf-memopt: error: " in capsys.readouterr().err


def test_unknown_command_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["lst"])
    assert "'lst'" in (error := capsys.readouterr().err) and "list" in error


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert hf_memopt.__version__ in capsys.readouterr().out


def test_as_a_module():
    assert "taco_adamw" in subprocess.check_output([sys.executable, "-m", "hf_memopt", "list"], text=True)


@pytest.mark.parametrize(
    "command",
    [["hf_memopt", "list"], ["hf_memopt", "--help"], ["hf_memopt.run", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_has_gone_is_no_error(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == "" and done.returncode in (0, 1)  # argparse ignores what it cannot print of its help


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hf_memopt", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "hf-memopt: the output could not be written: No space left on device.\n"
