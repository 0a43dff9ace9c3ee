"""A target whose layers lie on several devices, or on the disk, and come for each pass (accelerate)."""

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM

from specdec import Chat, DraftModelProposer, NgramProposer, SpeculativeGenerator
from tests.support import tiny

PARTS = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "model.rotary_emb", "lm_head")
PLACES = {
    "halves": {},
    "every other layer on the disk": dict.fromkeys(("model.layers.1", "model.layers.3"), "disk"),
    "all on the disk": dict.fromkeys(PARTS, "disk"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", num_hidden_layers=4).save_pretrained(folder / "whole")
    return folder


def loaded(folder, places):
    everywhere = dict.fromkeys(PARTS, "cpu") | places
    return AutoModelForCausalLM.from_pretrained(
        folder / "whole", device_map=everywhere, offload_folder=folder / "parts"
    ).eval()


def offloaded(folder):
    """Weights in memory that come to the executing device for each pass."""
    model = AutoModelForCausalLM.from_pretrained(folder / "whole").eval()
    places = dict.fromkeys(PARTS, "cpu") | {"model.layers.0": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder / "dispatched", force_hooks=True)


def target_of(folder, kind):
    return offloaded(folder) if kind == "dispatched" else loaded(folder, PLACES[kind])


@pytest.mark.parametrize("sampling", [False, True], ids=["T=0", "T=1"])
@pytest.mark.parametrize("kind", [*PLACES, "dispatched"])
@pytest.mark.parametrize("drafts", ["ngram", "draft"])
def test_the_text_is_the_whole_models(folder, kind, drafts, sampling):
    target, whole = target_of(folder, kind), tiny.model("llama", num_hidden_layers=4)
    proposer = NgramProposer() if drafts == "ngram" else DraftModelProposer(tiny.model("llama", num_hidden_layers=1))
    spec = SpeculativeGenerator(target, proposer, draft_length=3, on_unsupported="error")
    arguments = {**tiny.prompts(9, 4), "do_sample": sampling, "max_new_tokens": 16}
    torch.manual_seed(0)
    plain = whole.generate(**arguments)
    torch.manual_seed(0)
    assert spec.generate(**arguments).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


def test_a_conversation_with_an_embedding_on_the_disk(folder, chat_tokenizer):
    target = loaded(folder, PLACES["all on the disk"])
    answers = [
        Chat(SpeculativeGenerator(model, "ngram"), chat_tokenizer, do_sample=False, max_new_tokens=8).say("ab")
        for model in (target, tiny.model("llama", num_hidden_layers=4))
    ]
    assert answers[0] == answers[1]
