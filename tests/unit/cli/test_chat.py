"""A conversation in turns: each reads only what is new, and is what plain decoding of the whole text would say."""

import copy
from functools import wraps
from io import StringIO

import pytest
import torch
from jinja2 import TemplateError
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TextStreamer

from specdec import Chat, SpeculativeGenerator
from specdec.cli.streamer import ColourStreamer
from specdec.models.capability import Capability
from specdec.models.introspection import decoder_layers
from tests.support import tiny

NEW = 6


@pytest.fixture(params=["llama", "gemma3"])
def spec(request):
    """gemma3 has sliding windows, which a turn's text outgrows."""
    return SpeculativeGenerator(tiny.model(request.param), "ngram", draft_length=3)


def streamer(chat_tokenizer, stop_after=None):
    class Streamer(ColourStreamer):
        def put(self, value):
            super().put(value)
            if len(self.tokens) == stop_after:
                raise KeyboardInterrupt

    return Streamer(chat_tokenizer, Console(file=StringIO()))


def chat_of(spec, chat_tokenizer, **options):
    return Chat(spec, chat_tokenizer, do_sample=False, max_new_tokens=NEW, **options)


def alone(spec, chat_tokenizer, messages):
    """What plain decoding answers to the whole conversation."""
    ids = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    out = spec.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=NEW
    )
    return chat_tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def test_each_turn_is_what_plain_decoding_says(spec, chat_tokenizer):
    chat = chat_of(spec, chat_tokenizer, system="be")
    for said in ("abcabc", "xyx", "no"):
        chat.say(said, streamer(chat_tokenizer))
        *before, answer = chat.messages
        assert before[-1] == {"role": "user", "content": said}
        assert answer["content"] == alone(spec, chat_tokenizer, before)
    assert [m["role"] for m in chat.messages] == ["system"] + 3 * ["user", "assistant"]
    assert spec.report.num_plain_calls == 0


def test_a_turn_reads_only_what_is_new(chat_tokenizer, monkeypatch):
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram", draft_length=3)
    chat, read = chat_of(spec, chat_tokenizer), []
    forward = spec.model.forward

    @wraps(forward)
    def noting(*args, **kwargs):
        read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(spec.model, "forward", noting)
    assert spec.capability.masks  # found out by passes that are noted as well
    read.clear()
    chat.say("abcdefghabcdefgh", streamer(chat_tokenizer))
    assert read[0] == len("u:abcdefghabcdefgh|a:")
    read.clear()
    chat.say("no", streamer(chat_tokenizer))
    assert read[0] <= 2 + len("|u:no|a:")  # the last token of the answer is in no cache yet


def test_interrupted_it_goes_on_from_what_was_said(spec, chat_tokenizer):
    chat = chat_of(spec, chat_tokenizer)
    chat.say("abcabc", streamer(chat_tokenizer))
    with pytest.raises(KeyboardInterrupt):
        chat.say("xyx", streamer(chat_tokenizer, stop_after=2))
    assert len(chat.messages[-1]["content"]) == 2
    assert chat.messages[-1]["role"] == "assistant"
    chat.say("no", streamer(chat_tokenizer))
    assert chat.messages[-1]["content"] == alone(spec, chat_tokenizer, chat.messages[:-1])


def test_a_turn_that_failed_never_was(spec, chat_tokenizer):
    chat = chat_of(spec, chat_tokenizer)
    chat.say("abcabc", streamer(chat_tokenizer))
    before = list(chat.messages)

    class Broken(ColourStreamer):
        def put(self, value):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chat.say("xyx", Broken(chat_tokenizer, Console(file=StringIO())))
    assert chat.messages == before
    chat.say("no", streamer(chat_tokenizer))
    assert chat.messages[-1]["content"] == alone(spec, chat_tokenizer, chat.messages[:-1])


def test_a_turn_that_cannot_be_encoded_never_was(chat_tokenizer):
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram", draft_length=3)
    chat = chat_of(spec, chat_tokenizer)
    chat.say("abcabc", streamer(chat_tokenizer))
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"the text contains '\\udc80' at position 4, .*: remove it"):
        chat.say("bad \udc80", streamer(chat_tokenizer))
    template = chat_tokenizer.chat_template
    chat_tokenizer.chat_template = "{{ raise_exception('no such turn') }}"
    with pytest.raises(TemplateError, match="no such turn"):
        chat.say("bad", streamer(chat_tokenizer))
    chat_tokenizer.chat_template = template
    assert chat.messages == before
    chat.say("no", streamer(chat_tokenizer))
    assert chat.messages[-1]["content"] == alone(spec, chat_tokenizer, chat.messages[:-1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("way", ["speculated", "plain"])
@pytest.mark.parametrize("layer", [0, 1])
def test_interrupted_within_a_pass_each_layer_is_cut_to_the_same_text(name, way, layer, chat_tokenizer, monkeypatch):
    """In plain decoding the layers before it have seen a token that the others have not."""
    spec = SpeculativeGenerator(copy.deepcopy(tiny.model(name)), "ngram", draft_length=3)
    assert spec.capability.trees
    if way == "plain":
        monkeypatch.setattr(SpeculativeGenerator, "capability", Capability(None, "for the test"))
    chat = chat_of(spec, chat_tokenizer)
    chat.say("abcabc", streamer(chat_tokenizer))
    passes = []

    def stop(module, arguments):
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt

    stopping = decoder_layers(spec.model)[layer].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        chat.say("xyx", streamer(chat_tokenizer))
    stopping.remove()
    for said in ("no", "yes"):
        chat.say(said, streamer(chat_tokenizer))
        assert chat.messages[-1]["content"] == alone(spec, chat_tokenizer, chat.messages[:-1])


def test_without_a_chat_template_it_says_so(spec):
    with pytest.raises(ValueError, match="no chat template"):
        Chat(spec, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))))


def test_it_says_its_answer_without_a_streamer_and_with_transformers_own(spec, chat_tokenizer, capsys):
    chat = chat_of(spec, chat_tokenizer)
    answers = [chat.say("abcabc"), chat.say("xyx", TextStreamer(chat_tokenizer, skip_prompt=True))]
    for turn, answer in enumerate(answers):
        assert answer == alone(spec, chat_tokenizer, chat.messages[: 2 * turn + 1])
        assert chat.messages[2 * turn + 1] == {"role": "assistant", "content": answer}
    assert capsys.readouterr().out.rstrip("\n") == answers[1]


def test_after_an_edit_it_reads_again_from_there(spec, chat_tokenizer):
    chat = chat_of(spec, chat_tokenizer)
    chat.say("abcabc")
    chat.messages[0]["content"] = "abxabx"
    assert chat.say("no") == alone(spec, chat_tokenizer, chat.messages[:-1])


@pytest.mark.parametrize(
    "setting",
    [
        {"use_cache": False},
        {"return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"num_beams": 2},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_do_not_fit_a_conversation_do_not_change_it(spec, chat_tokenizer, setting, monkeypatch):
    expected, chat = (chat_of(spec, chat_tokenizer) for _ in range(2))
    for said in ("abcabc", "xyx"):
        expected.say(said)
    for name, value in setting.items():
        monkeypatch.setattr(spec.model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"leave out {name}"):
            chat_of(spec, chat_tokenizer, **setting)
    for said in ("abcabc", "xyx"):
        chat.say(said)
    assert chat.messages == expected.messages
    assert spec.report.num_plain_calls == 0


def test_an_option_that_does_not_fit_one_answer_is_refused(spec, chat_tokenizer):
    with pytest.raises(ValueError, match="leave out num_return_sequences=2"):
        Chat(spec, chat_tokenizer, do_sample=True, num_return_sequences=2)


def test_stop_strings_of_the_model_end_an_answer(spec, chat_tokenizer, monkeypatch):
    whole = chat_of(spec, chat_tokenizer).say("abcabc")
    monkeypatch.setattr(spec.model.generation_config, "stop_strings", [whole[2]])
    assert chat_of(spec, chat_tokenizer).say("abcabc") == whole[: whole.index(whole[2]) + 1]
