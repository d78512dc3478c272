"""The command ``hf-memopt``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hf_memopt
from hf_memopt.cli import main


def test_list(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for spec in hf_memopt.list_optimizers():
        assert spec.name in out and spec.summary in out and spec.docs in out
    assert "seed: int = 0, dense_embeddings: true|false = false" in out


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
