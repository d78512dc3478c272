"""The search and the page of `benchmarks/fits.py`, on records that are there already."""

from dataclasses import asdict

import pytest

from benchmarks import common, fits, fits_page
from hf_memopt.memory.storages import COMPONENTS


def record(case, nbytes):
    parts = dict.fromkeys(COMPONENTS, 0) | {"weights": nbytes}
    kind = {
        "component": "activations",
        "operation": "mm",
        "shape": [2, 3],
        "dtype": "float32",
        "count": 1,
        "nbytes": 24,
    }
    memory = {
        "peak_bytes": nbytes,
        "peak_phase": "step",
        "parameters": 1,
        "phases": {"step": {"nbytes": nbytes, "components": parts, "position": 1}},
        "largest": [kind],
    }
    return {"case": asdict(case), "memory": memory, "versions": {"torch": "0"}, "revision": "r"}


@pytest.fixture
def folder(tmp_path):
    """16 GiB at 2048 tokens and 1/1024 GiB a token more, for every length the search may ask for."""
    for tokens in range(2048, 16384, 256):
        case = fits.Case("taco_layerwise", tokens=tokens)
        common.write_json(tmp_path / f"{case.name}.json", record(case, 14 * fits.GIB + tokens * 2**20))
    return tmp_path


@pytest.mark.parametrize(("gib", "fitting"), [(18, 2816), (20, 4864), (24, 8704)])
def test_the_answer_fits_and_the_next_does_not(folder, gib, fitting):
    question = fits.Question("longest", fits.Case("taco_layerwise"), "tokens", 256, gib)
    found = fits.answer(question, folder, reserve=0.7)
    assert (found["fits"], found["next"]) == (fitting, fitting + 256)
    assert found["peak_bytes"] <= found["room_bytes"] < found["next_peak_bytes"]


def test_what_does_not_fit_at_all_is_said(folder):
    question = fits.Question("longest", fits.Case("taco_layerwise"), "tokens", 256, 16)
    found = fits.answer(question, folder, reserve=0.7)
    assert found["fits"] is None and found["smallest"] == 2048
    assert (
        "not even 2,048"
        in fits_page.answers([found | {"what": "", "gib": 16, "reserve_gib": 0.7, "case": {"optimizer": ""}}])[0][
            "fits"
        ]
    )


def test_the_page_has_the_standard_cases_and_a_plot(folder):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    page = fits_page.write_page(folder)
    assert "taco_layerwise, 7b, 2048 tokens" in page and "2304 tokens" not in page
    assert (folder / "fits.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_cards_in_the_readme_is_that_of_the_results():
    readme = (common.ROOT / "README.md").read_text(encoding="utf8")
    reserve = fits.RESERVE_GIB
    assert fits_page.cards_block(fits.FOLDER, reserve) in readme, "run python -m benchmarks.fits --tables --readme"


def test_the_smallest_card():
    assert fits_page.smallest_card(6.8 * fits.GIB, 1.0) == "8 GB"
    assert fits_page.smallest_card(6.8 * fits.GIB + 1, 1.0) == "12 GB"
    assert fits_page.smallest_card(80 * fits.GIB, 1.0) == "over 80 GB"
