"""Functions that wait for a module: called once, right after its code, and never in the way of its import."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import pytest

from hf_memopt.integrations.import_hooks import after_import


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module that is not imported yet; its name."""
    name = f"waited_for_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_called_once_after_the_code_of_the_module(module):
    values = []
    after_import(module, lambda m: values.append(m.value))
    assert values == []
    imported = importlib.import_module(module)
    importlib.import_module(module)
    assert values == [1]
    assert imported.__spec__.loader is imported.__loader__


def test_called_at_once_when_imported_already(module):
    importlib.import_module(module)
    values = []
    after_import(module, lambda m: values.append(m.value))
    assert values == [1]


def test_several_in_order(module):
    order = []
    for i in range(3):
        after_import(module, lambda m, i=i: order.append(i))
    importlib.import_module(module)
    assert order == [0, 1, 2]


def test_failure_is_a_warning(module, caplog):
    def broken(m):
        raise KeyError("gone")

    after_import(module, broken)
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        assert importlib.import_module(module).value == 1
    assert f"broken failed on {module}: KeyError: 'gone'" in caplog.text


def test_module_that_fails_or_does_not_exist(tmp_path, monkeypatch):
    called = []
    (tmp_path / "fails_to_import.py").write_text("raise ValueError('own error')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, error in (("fails_to_import", ValueError), ("no_such_module_anywhere", ModuleNotFoundError)):
        after_import(name, called.append)
        with pytest.raises(error):
            importlib.import_module(name)
    assert called == []


def test_beside_another_finder_that_asks_all_finders(module, monkeypatch):
    class Asking:
        busy = False

        def find_spec(self, name, path=None, target=None):
            if self.busy or name != module:
                return None
            self.busy = True
            try:
                found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
                return next((spec for spec in found if spec is not None), None)
            finally:
                self.busy = False

    values = []
    after_import(module, lambda m: values.append(m.value))
    monkeypatch.setattr(sys, "meta_path", [Asking(), *sys.meta_path])
    importlib.import_module(module)
    assert values == [1]


def test_without_transformers_the_optimizer_still_works():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import hf_memopt, torch\n"
        "p = torch.nn.Parameter(torch.ones(64, 64)); p.grad = torch.ones(64, 64)\n"
        "hf_memopt.TacoAdamW([p], lr=0.1).step()\n"
        "print(p.mean().item() < 1, len(hf_memopt.list_optimizers()) >= 4, hf_memopt.last_complete_checkpoint('.'))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "True", "None"]
