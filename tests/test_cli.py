"""What the commands say of bad input, before any work is done."""

import pytest
from typer.testing import CliRunner

from specdec.cli import app


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "TARGET", "a", "--proposer", "ngrams"], 'proposer must be "ngram"'),
        (["generate", "/no/such/model", "a"], "/no/such/model is neither a folder with a model nor a hub"),
        (["doctor", "TARGET", "eagle"], 'proposer must be "ngram"'),
        (["regenerate", "TARGET", "PROMPTS", "OUT", "--proposer", "draft"], 'proposer must be "ngram"'),
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(command, message, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    places = {"PROMPTS": str(tmp_path / "prompts.jsonl"), "OUT": str(tmp_path / "out.jsonl")}
    result = CliRunner().invoke(app, [places.get(word, word) for word in command])
    assert result.exit_code == 2
    assert message in result.output
