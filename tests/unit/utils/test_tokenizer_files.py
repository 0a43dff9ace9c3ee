"""`load_tokenizer`: a folder without a tokenizer is an error, not a tokenizer of a few special tokens."""

import json
import shutil

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer
from typer.testing import CliRunner

from specdec.cli.app import app
from specdec.proposers.draft_models.vocabularies import tokenizers_at_hand
from specdec.utils.tokenizer_files import load_tokenizer, require_tokenizer
from tests.support import tiny

FAULT = r"holds no tokenizer: neither tokenizer.json nor tokenizer.model, vocab.json or vocab.txt. Copy the "
KINDS = ("qwen2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "t5")


def bare(folder, kind="qwen2", settings=None):
    """A folder with a config and weights only; `settings` as tokenizer_config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 5000}))
    (folder / "model.safetensors").write_bytes(b"")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_missing_files_are_named(tmp_path, kind, settings):
    folder = str(bare(tmp_path / kind, kind, settings))
    for ask in (require_tokenizer, load_tokenizer):
        with pytest.raises(ValueError, match=FAULT):
            ask(folder)


def test_merges_alone_are_no_tokenizer(tmp_path):
    folder = bare(tmp_path / "model", "gpt2")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=FAULT):
        load_tokenizer(str(folder))


def test_a_downloaded_repository_without_them(tmp_path, monkeypatch):
    """transformers made a tokenizer of one token here, and every text was empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "models--someone--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    bare(place / "snapshots" / ("a" * 40))
    with pytest.raises(ValueError, match=f"someone/model {FAULT}"):
        load_tokenizer("someone/model", cache_dir=str(tmp_path))


def test_what_is_complete_is_loaded(files, tmp_path):
    folder = str(files / "model")
    assert load_tokenizer(folder).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    made_of_bytes = bare(tmp_path / "bytes", "t5", {"tokenizer_class": "ByT5Tokenizer"})
    assert load_tokenizer(str(made_of_bytes))("a").input_ids


COMMANDS = ["generate MODEL hello", "chat MODEL", "bench MODEL ngram", "doctor MODEL ngram", "serve MODEL"]
COMMANDS += ["regenerate MODEL PROMPTS OUT", "train MODEL DATA OUT", "train MODEL DATA OUT --dry-run"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so_before_it_loads_weights(files, tmp_path, command):
    model = tmp_path / "model"
    shutil.copytree(files / "model", model, ignore=shutil.ignore_patterns("*token*"))
    (tmp_path / "prompts.txt").write_text("a b")
    names = {"MODEL": str(model), "DATA": str(files / "data.jsonl"), "OUT": str(tmp_path / "out")}
    names["PROMPTS"] = str(tmp_path / "prompts.txt")
    result = CliRunner().invoke(app, [names.get(word, word) for word in command.split()])
    assert result.exit_code == 2
    assert f"{model} holds no tokenizer: " in result.output
    assert "Loading weights" not in result.output


def test_a_draft_without_a_tokenizer_is_not_compared_by_an_empty_one(files, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(files / "model", folder, ignore=shutil.ignore_patterns("*token*"))
    draft = tiny.on_host("llama")
    draft.config._name_or_path = draft.name_or_path = str(folder)
    assert not tokenizers_at_hand(draft, draft)
