"""The notebooks of `examples/`, run from top to bottom by nbmake."""

from pathlib import Path

import pytest

from specdec.demo import weights
from specdec.paths import cache_folder

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))
SECONDS = 280  # for one cell


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, monkeypatch):
    """With fewer tokens than in the committed outputs, where its cells say so (`nbmake.mock`)."""
    nb_run = pytest.importorskip("nbmake.nb_run")
    source = notebook.read_text(encoding="utf-8")
    if "lm_eval" in source:
        pytest.importorskip("lm_eval")
    used = {"MODEL": weights.DRAFT, "DRAFT": weights.DRAFT}  # of a target, `nbmake.mock` puts the smaller one here
    needed = {name for variable, name in used.items() if f'{variable} = \\"{name}\\"' in source}
    missing = [name for name in needed if not (cache_folder() / name / "config.json").exists()]
    if missing:
        pytest.skip(f"needs {missing[0]}, which `make demo SMALL=1` downloads")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    result = nb_run.NotebookRun(notebook, SECONDS).execute()
    assert result.error is None, result.error.trace
