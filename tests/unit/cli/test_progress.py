"""`progress_bar` where standard error is no terminal: lines now and then, with the time left."""

import pytest

from specdec.cli.progress import ProgressLines, progress_bar


def test_lines_come_at_most_every_thirty_seconds(capsys):
    seconds = iter([0.0, 1.0, 29.0, 40.0, 60.0, 130.0, 140.0])
    lines = ProgressLines("measuring", clock=lambda: next(seconds))
    for done in (0, 10, 20, 30, 60, 60):
        lines.update(done, 60)
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 20 of 60, about 1 min 20 s left",
        "measuring: 60 of 60",
    ]


@pytest.mark.parametrize(
    ("done", "total", "line"),
    [(4, 1200, "answers: 4 of 1,200"), (5, None, "answers: 5"), (8, 10, "answers: 8 of 10, about 20 s left")],
)
def test_a_note_comes_last(capsys, done, total, line):
    """Four were done when the command began: they took it no time."""
    seconds = iter([0.0, 0.0, 40.0])
    lines = ProgressLines("answers", clock=lambda: next(seconds))
    lines.update(4, total)
    lines.update(done, total, "70 tokens/s")
    assert capsys.readouterr().err == f"{line}, 70 tokens/s\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_log_gets_no_bar(capsys, monkeypatch, enabled):
    monkeypatch.setattr("specdec.cli.progress.PERIOD", 0.0)
    with progress_bar("measuring", enabled=enabled) as progress:
        progress(0, 4)
    assert capsys.readouterr().err == ("measuring: 0 of 4\n" if enabled else "")
