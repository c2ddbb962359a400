"""Every experiment of the papers is a file that says what differs, and small enough when quick."""

import pytest

from paceline.bench import grid, papers
from paceline.errors import SpecError

WANTED = {"P1": 4, "P2": 7, "P3": 4, "P4": 3, "P5": 3}


@pytest.mark.parametrize("name", papers.names())
def test_a_preset_is_complete(name):
    preset = papers.load(name)

    assert preset.name == name
    assert preset.paper is not None
    assert preset.paper.differs
    assert preset.paper.title
    quick = list(grid.schedule(grid.cells(preset.quickly()), preset.quickly().compare.repeats))
    measured = [cell for _, cell in quick if cell.experiment.engine != "predict"]
    assert len(measured) <= 16, "quick means minutes"
    assert grid.cells(preset)


def test_every_paper_has_its_experiments():
    found = [preset.paper.paper for preset in papers.load_all() if preset.paper]

    assert {paper: found.count(paper) for paper in WANTED} == {
        paper: max(count, found.count(paper)) for paper, count in WANTED.items()
    }


def test_a_beginning_stands_for_all_that_have_it():
    assert len(papers.find(["p2"])) == 7
    assert [preset.name for preset in papers.find(["p1-fig8"])] == ["p1-fig8"]


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(SpecError, match='did you mean "p1-fig8"'):
        papers.find(["p1-fig88"])


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("p1-fig10-1gbit", {"server:mode=async", "server:mode=async as tensorflow"}),
        ("p3-fig5", {"ring", "ring as horovod", "hybrid:between=server", "server as tensorflow"}),
    ],
)
def test_a_figure_has_the_papers_client_beside_ours(name, clients):
    cells = grid.cells(papers.load(name))
    assert clients <= {cell.architecture for cell in cells}
    keys = [cell.key for cell in cells]
    assert len(keys) == len(set(keys))
    for cell in cells:
        if cell.software:
            assert cell.experiment.engine == "predict"
            assert cell.experiment.prediction.stack == cell.software
