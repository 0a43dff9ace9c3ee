"""The notebooks of `examples/`, run from top to bottom by nbmake."""

from pathlib import Path

import pytest

from examples.demo import weights
from specdec.utils.paths import cache_folder

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))
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
    downloaded = (cache_folder() / weights.DRAFT / "config.json").exists()
    if f'MODEL = \\"{weights.DRAFT}\\"' in source and not downloaded:
        pytest.skip(f"needs {weights.DRAFT}, which `make demo` downloads")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    result = nb_run.NotebookRun(notebook, SECONDS).execute()
    assert result.error is None, result.error.trace
