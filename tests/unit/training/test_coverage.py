"""What is said about the texts of a run: how much of them the draft vocabulary covers, and who wrote them."""

import pytest
import torch

from specdec.data.survey import survey
from specdec.training import starting_head
from tests.support.training import run, written

ANSWERED = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]


def line(number, target):
    ids = [5, 6, 7, 8, 9]
    sequences = [{"input_ids": ids, "loss_mask": [0, 0, 1, 1, 1]}]
    return {"id": number, "target": target, "messages": ANSWERED, "sequences": sequences, "tokenizer": "0"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["mine"] * 3, "mine wrote these answers, as `specdec regenerate` recorded"),
        ([""] * 3, "whether mine wrote these answers is unknown"),  # a target in memory has no name
        ([None] * 3, "whether mine wrote these answers is unknown: `specdec regenerate` lets it write them"),
        (
            ["mine", None, "theirs"],
            "1 of 3 entries are answered by mine, as `specdec regenerate` recorded, 1 by theirs, for 1 this is unknown:"
            " `specdec regenerate` lets mine write them",
        ),
        (["theirs"] * 2, "0 of 2 entries are answered by mine, as `specdec regenerate` recorded, 2 by theirs: "),
    ],
)
def test_who_wrote_the_answers_is_said_only_of_recorded_ones(tmp_path, targets, expected):
    lines = [{"messages": ANSWERED} if name is None else line(i, name) for i, name in enumerate(targets)]
    assert survey(written(tmp_path / "data.jsonl", *lines)).origin("mine").startswith(expected)


def test_a_file_that_changed_is_surveyed_again(tmp_path):
    data = written(tmp_path / "data.jsonl", {"text": "a"})
    first = survey(data)
    assert survey(data) is first
    written(data, {"text": "a"}, {"text": "b"})
    assert survey(data).entries == 2
    assert survey(data).checksum != first.checksum


def test_coverage_is_counted_over_held_out_answers(files, tmp_path):
    """From which the vocabulary was not chosen."""
    written(tmp_path / "data.jsonl", *[{"prompt": "a", "response": "b c d"}] * 4)
    held = written(tmp_path / "held.jsonl", {"prompt": "a", "response": "b x y z w"})
    options = ["--held-out-data", str(held), "--draft-vocab", "4", "--max-minutes", "0"]
    (tmp_path / "model").symlink_to(files / "model")
    result = run(tmp_path, tmp_path / "other", *options)
    said = " ".join(result.output.split())
    assert "covers 33.3% of the tokens in 1 held-out answers (100.0% in those trained on)" in said
    assert f"whether {tmp_path}/model wrote these answers is unknown: `specdec regenerate` lets it write them" in said
    assert "the target writes" not in said


def test_a_plan_claims_no_origin_either(files, tmp_path):
    said = " ".join(run(files, tmp_path / "out", "--dry-run").output.split())
    assert "wrote these answers is unknown" in said
    assert "of them in answers" in said
    assert "own" not in said.split("updates")[0]


def test_counts_of_nothing():
    none = torch.zeros(4, dtype=torch.long)
    assert "covers 0.0%" in starting_head.coverage(torch.tensor([0]), none, none, 1)
