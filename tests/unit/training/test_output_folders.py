"""Where commands write: nothing is mixed with files of others, and what cannot be written is said at once."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.training.plan import plan
from specdec.training.recipe import Recipe
from specdec.training.run import train
from tests.support.training import run, written


def said(result):
    return " ".join(result.output.split())


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded before the error."""
    for place in ("preparation", "starting_head"):
        monkeypatch.setattr(f"specdec.training.{place}.load_model", lambda *rest, **more: 1 / 0)
    monkeypatch.setattr("specdec.cli.data.load", lambda *rest, **more: 1 / 0)


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("name", ["recipe.json", "notes.txt", "photos/one.jpg"])
def test_training_leaves_folders_of_others_alone(files, tmp_path, unloaded, options, name):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"title": "pancakes", "flour": 250}')
    result = run(files, tmp_path / "mine", *options)
    assert result.exit_code == 2
    first = name.partition("/")[0]
    assert f"{tmp_path}/mine holds other files ({first}) and is not the folder of a training run" in said(result)
    assert f"choose another folder, such as {tmp_path}/mine/training" in said(result)
    assert "MISSING" not in result.output
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == [first]


def test_many_files_are_not_all_named(files, tmp_path):
    for name in "edcba":
        (tmp_path / name).touch()
    assert "other files (a, b, c and 2 more)" in said(run(files, tmp_path))


def test_python_refuses_them_too(files, tmp_path, unloaded):
    (tmp_path / "notes.txt").write_text("mine")
    recipe = Recipe(str(files / "model"), files / "data.jsonl", tmp_path, device="cpu")
    for call in (train, plan):
        with pytest.raises(ValueError, match="is not the folder of a training run"):
            call(recipe)
        with pytest.raises(ValueError, match="is a file: give a folder"):
            call(replace(recipe, out=tmp_path / "notes.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_systems_have_opened_counts_as_empty(files, tmp_path):
    for name in (".DS_Store", "Thumbs.db", "._x", ".gitkeep", ".lock", ".recipe.part"):
        (tmp_path / name).touch()
    (tmp_path / "lost+found").mkdir()
    assert "not finished yet" in run(files, tmp_path, "--max-minutes", "0").output


def test_a_plan_for_the_folder_of_another_recipe_is_refused(files, tmp_path):
    assert "not finished yet" in run(files, tmp_path, "--max-minutes", "0").output
    assert run(files, tmp_path, "--dry-run").exit_code == 0
    result = run(files, tmp_path, "--dry-run", "--seed", "1")
    assert result.exit_code == 2
    assert "another recipe (seed was 0, is 1)" in said(result)


def test_an_option_that_an_identity_does_not_record_is_named_in_words(files, tmp_path):
    """Of a run of another version, for example."""
    recipe = Recipe(str(files / "model"), files / "data.jsonl", tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps({"target": recipe.target, "texts": "other", "flour": "250"}))
    result = run(files, tmp_path)
    assert result.exit_code == 2
    assert "holds the work of another recipe" in said(result)
    assert "MISSING" not in result.output


def test_answers_go_into_no_file_of_others(files, tmp_path, unloaded):
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "a"})
    other = {"id": 0, "target": "another/model", "messages": [{"role": "user", "content": "a"}]}
    for content, message in (
        ("my notes\n", "is not a file of answers: choose another output file"),
        (json.dumps(other) + "\n", "holds answers of another/model: choose another output file"),
        (json.dumps(other | {"target": str(files / "model"), "temperature": 1.0}) + "\n", "with temperature 1.0"),
    ):
        (tmp_path / "out.jsonl").write_text(content)
        command = ["regenerate", str(files / "model"), str(prompts), str(tmp_path / "out.jsonl")]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        assert message in said(result)
        assert (tmp_path / "out.jsonl").read_text() == content
