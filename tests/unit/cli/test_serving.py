"""`specdec serve`, asked by the real `openai` client: answers are those of plain `generate()`."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from specdec.cli.serving.answer import Answer  # noqa: E402
from specdec.cli.serving.processors import Penalties  # noqa: E402
from specdec.cli.serving.sockets import listen  # noqa: E402
from specdec.cli.serving.text import TextDecoder  # noqa: E402
from tests.support.served import ASKED, streamed  # noqa: E402


def test_answers_are_plain_decodings(served):
    expected = served.plain_text()
    calls = served.spec.report.num_calls
    assert [model.id for model in served.client.models.list()] == [served.name]
    assert served.client.models.retrieve(served.name).id == served.name
    whole = served.chat(temperature=0)
    assert whole.choices[0].message.content == expected
    assert (whole.choices[0].finish_reason, whole.choices[0].message.role) == ("length", "assistant")
    prompt = served.prompt().shape[1]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        prompt,
        8,
        prompt + 8,
    )
    texts, reasons, _, usage = streamed(served.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert (texts, reasons, usage) == ({0: expected}, {0: "length"}, whole.usage)
    assert streamed(served.chat(stream=True))[3] is None
    served.settle()
    assert served.spec.report.num_calls == calls + 3
    assert served.spec.report.num_plain_calls == 0
    assert served.spec.report.num_draft_tokens > 0


def test_two_at_once_have_their_own_seeds_and_settings(served):
    settings = [{"seed": 5, "temperature": 0.7}, {"seed": 6, "temperature": 1.3, "top_p": 0.9}, {"temperature": 0}]
    expected = [
        served.plain_text(do_sample=True, max_new_tokens=16, **settings[0]),
        served.plain_text(do_sample=True, max_new_tokens=16, **settings[1]),
        served.plain_text(max_new_tokens=16),
    ]
    assert len({*expected}) == 3

    def answer(i):
        client = served.of(f"key {i}")
        if i % 2:
            return streamed(served.chat(client, max_tokens=16, stream=True, **settings[i % 3]))[0][0]
        return served.chat(client, max_tokens=16, **settings[i % 3]).choices[0].message.content

    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert list(pool.map(answer, range(3))) == expected


def test_the_generation_config_decides_what_a_request_leaves_out(served):
    config = served.spec.model.generation_config
    try:
        config.do_sample, config.temperature, config.top_k = True, 0.8, 20
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20}
        expected = served.plain_text(seed=4, **sampled)
        assert served.chat(seed=4).choices[0].message.content == expected
        expected = served.plain_text(seed=4, **sampled | {"top_p": 0.5, "top_k": 3})
        assert served.chat(seed=4, top_p=0.5, extra_body={"top_k": 3}).choices[0].message.content == expected
        assert served.chat(temperature=0).choices[0].message.content == served.plain_text()
        config.max_new_tokens = 5
        assert served.chat(max_tokens=None).usage.completion_tokens == 5
    finally:
        config.do_sample, config.temperature, config.top_k, config.max_new_tokens = False, None, None, None


def test_a_request_has_its_own_settings_of_speculative_decoding(served):
    expected = served.plain_text(max_new_tokens=16)
    for options, most in (({"draft_length": 2}, 2), ({"draft_length": 0}, 0), ({"draft_length": 3, "exact": True}, 3)):
        with served.spec.watch() as rounds:
            answer = served.chat(temperature=0, max_tokens=16, extra_body=options)
        assert answer.choices[0].message.content == expected
        assert max(len(one.tokens) for one in rounds) - 1 == most
        assert served.spec.last_report.num_exact_calls == options.get("exact", False)
    served.chat(temperature=1, seed=3, extra_body={"rule": "block"})
    assert any(kind.rule == "block" for kind in served.spec._sessions.own.estimates)
    assert served.spec.draft_length == 3  # of the other requests


def test_no_seed(served):
    """Texts differ, unless the server has a seed of its own; greedy texts do not depend on it."""
    texts = {served.chat(temperature=1.5, max_tokens=16).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(served, stream):
    expected = {i: served.plain_text(seed=7 + i, do_sample=True, temperature=1.1) for i in range(3)}
    assert len({*expected.values()}) == 3
    asked = {"n": 3, "seed": 7, "temperature": 1.1}
    if stream:
        texts, reasons, _, usage = streamed(served.chat(stream=True, stream_options={"include_usage": True}, **asked))
    else:
        whole = served.chat(**asked)
        texts = {choice.index: choice.message.content for choice in whole.choices}
        reasons, usage = {choice.index: choice.finish_reason for choice in whole.choices}, whole.usage
    assert texts == expected
    assert reasons == dict.fromkeys(range(3), "length")
    assert usage.completion_tokens == 24


def test_completions(served):
    """Texts and token ids, several prompts, several choices of each; 16 tokens unless the request says otherwise."""
    ids = served.tokenizer("abcabcab")["input_ids"]
    expected = served.plain_text(torch.tensor([ids]), max_new_tokens=16)
    assert served.complete(max_tokens=None).choices[0].text == expected
    assert served.complete(prompt=ids, max_tokens=16).choices[0].text == expected
    assert streamed(served.complete(stream=True, max_tokens=16))[0] == {0: expected}
    prompts = [ids, ids[:3]]
    sampled = {"do_sample": True, "temperature": 1.0}
    expected = [served.plain_text(torch.tensor([p]), seed=3 + i, **sampled) for p in prompts for i in range(2)]
    found = served.complete(prompt=prompts, n=2, seed=3, temperature=1)
    assert [choice.text for choice in found.choices] == expected
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 32)
    with pytest.raises(openai.BadRequestError, match="prompt gives no tokens"):
        served.complete(prompt="")
    with pytest.raises(openai.BadRequestError, match="prompt has token 64, but the model has 64"):
        served.complete(prompt=[3, 64])


def test_a_long_answer_fills_the_context(served):
    """As vLLM does without max_tokens; what exceeds the limit is refused before it waits."""
    ids = [1] * 1000
    found = served.complete(prompt=ids, max_tokens=24)
    assert found.usage.total_tokens == 1024
    content = "a" * (1010 - served.prompt().shape[1])
    found = served.chat(messages=[{"role": "user", "content": content}], max_tokens=None)
    assert found.usage.total_tokens == 1024
    assert found.choices[0].finish_reason == "length"
    with served.spec.hold.on():
        for refused in ({"prompt": ids, "max_tokens": 25}, {"prompt": [1] * 1024}, {"prompt": "a" * 80_000}):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as error:
                served.complete(**refused)
            assert error.value.code == "context_length_exceeded"
        assert served.health["busy"] is False


def test_other_requests_do_not_wait_for_a_long_prompt_to_be_tokenized(served, monkeypatch):
    reader, goes_on = served.server._reader, Event()
    tokenize = reader._completion
    monkeypatch.setattr(reader, "_completion", lambda request: goes_on.wait(60) and tokenize(request))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.complete, temperature=0)
        assert served.chat(temperature=0).choices[0].message.content == served.plain_text()
        assert not waiting.done()
        goes_on.set()
        assert waiting.result().usage.completion_tokens == 8


def test_the_ends_of_texts(served):
    """The model's end token: not part of the text, but counted."""
    tokens = served.plain(max_new_tokens=24)
    place = 5
    config, ends = served.spec.model.generation_config, served.spec.model.generation_config.eos_token_id
    config.eos_token_id = int(tokens[place])
    served.server._worker._ends = {int(tokens[place])}
    try:
        cut = tokens.tolist().index(int(tokens[place]))
        whole = served.chat(temperature=0, max_tokens=24, logprobs=True)
        assert whole.choices[0].message.content == served.tokenizer.decode(tokens[:cut])
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens == cut + 1
        assert "".join(entry.token for entry in whole.choices[0].logprobs.content) == whole.choices[0].message.content
    finally:
        config.eos_token_id, served.server._worker._ends = ends, set()


def test_a_stop_string_of_the_model_is_an_end(served, monkeypatch):
    full = served.plain_text(max_new_tokens=24)
    end = full.index(full[5]) + 1
    for stop, limit in ((full[5], 24), ([full[5]], end)):  # in time, and with the last token
        monkeypatch.setattr(served.spec.model.generation_config, "stop_strings", stop)
        whole = served.chat(temperature=0, max_tokens=limit)
        assert whole.choices[0].message.content == full[:end]
        assert whole.choices[0].finish_reason == "stop"


def test_a_completion_keeps_the_blank_that_its_tokenizer_drops_at_the_start_of_a_text():
    made = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "<0xC3>": 2, "<0xA9>": 3}, unk_token="\u2581a"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)

    def text(before, tokens):
        decoder = TextDecoder(tokenizer, before)
        return "".join([*map(decoder.add, tokens), decoder.end()])

    assert text([], [0, 1]) == "a b"
    assert text([1, 0], [0, 1]) == text([0] * 20, [0, 1]) == " a b"
    assert text([1], [2, 3, 0]) == "\u00e9 a"
    assert text([1, 2], [0]).endswith("a")  # the prompt ends within a character


@pytest.mark.parametrize(("limit", "reason"), [(2, "length"), (3, "stop")])
def test_an_answer_that_ends_early_met_a_stop_string_of_the_model(limit, reason, chat_tokenizer):
    """It may be a special token, whose text is not decoded."""
    sent = []
    answer = Answer(0, chat_tokenizer, [], {1}, None, Event(), ["<|eot|>"], limit, (), sent.append, lambda: None)
    for length in (1, 2):
        assert not answer(torch.full((1, length), 5), torch.empty(0)).any()
    answer.finish()
    assert (sent[-1].reason, sent[-1].num_tokens) == (reason, 2)


def test_no_free_address_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"cannot listen on 203\.0\.113\.5"):
        listen("203.0.113.5", 0)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_stop_strings(served, length, place):
    """At the beginning, within a block of accepted tokens, over several tokens; nothing of one is streamed."""
    full = served.plain_text(max_new_tokens=24)
    stop = full[place : place + length]
    cut = full.index(stop)
    whole = served.chat(temperature=0, max_tokens=24, stop=["@", stop, stop + "@"], logprobs=True)
    assert whole.choices[0].message.content == full[:cut]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == cut + length
    assert [entry.token for entry in whole.choices[0].logprobs.content] == list(full[:cut])
    assert streamed(served.chat(temperature=0, max_tokens=24, stop=stop, stream=True))[:2] == (
        {0: full[:cut]},
        {0: "stop"},
    )
    begun = full[-1] + "@"  # the text ends where a stop string may begin
    for stream in (False, True):
        found = served.chat(temperature=0, max_tokens=24, stop=begun, stream=stream)
        text = streamed(found)[0][0] if stream else found.choices[0].message.content
        assert text == full


def test_log_probabilities(served):
    """Those of the model before temperature and penalties; streamed as well."""
    ids = served.prompt()
    output = served.plain(ids, seed=2, do_sample=True, temperature=0.5)
    text = torch.cat([ids[0], output])[None]
    with torch.no_grad():
        rows = served.model(text).logits[0, ids.shape[1] - 1 : -1].float().log_softmax(-1)
    asked = {"logprobs": True, "top_logprobs": 3, "seed": 2, "temperature": 0.5}
    entries = served.chat(**asked).choices[0].logprobs.content
    assert [entry.token for entry in entries] == list(served.tokenizer.decode(output))
    assert [entry.logprob for entry in entries] == pytest.approx(
        rows.gather(1, output[:, None])[:, 0].tolist(), abs=1e-4
    )
    top, names = rows.topk(3)
    assert [[each.logprob for each in entry.top_logprobs] for entry in entries] == [
        pytest.approx(row, abs=1e-4) for row in top.tolist()
    ]
    decoded = [[served.tokenizer.decode([token]) for token in row] for row in names.tolist()]
    assert [[each.token for each in entry.top_logprobs] for entry in entries] == decoded
    assert entries[0].bytes == list(entries[0].token.encode())
    assert streamed(served.chat(stream=True, **asked))[2][0] == entries
    assert served.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    old = served.complete(prompt=ids[0].tolist(), logprobs=2, seed=2, temperature=0.5).choices[0].logprobs
    assert old.tokens == [entry.token for entry in entries]
    assert old.token_logprobs == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert old.text_offset == list(range(8))
    assert all({*row[:2]} <= {*found} for row, found in zip(decoded, old.top_logprobs, strict=True))
    assert served.spec.report.num_plain_calls == 0


def test_penalties_and_biases(served):
    ids = served.prompt()
    penalties = {"frequency_penalty": 1.2, "presence_penalty": 0.7}
    expected = served.plain_text(logits_processor=[Penalties(ids.shape[1], 1.2, 0.7)], max_new_tokens=24)
    assert expected != served.plain_text(max_new_tokens=24)
    assert served.chat(temperature=0, max_tokens=24, **penalties).choices[0].message.content == expected
    texts = served.chat(temperature=1, n=2, seed=1, logit_bias={"7": 100})
    assert [choice.message.content for choice in texts.choices] == [served.tokenizer.decode([7]) * 8] * 2
    banned = served.plain_text()
    token = served.tokenizer(banned)["input_ids"][0]
    assert served.chat(temperature=0, logit_bias={str(token): -100}).choices[0].message.content[0] != banned[0]


def test_neutral_values_and_nulls(served):
    """What asks for nothing is accepted; a null is as good as absent."""
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "user": "me",
        "n": None,
        "stop": None,
        "seed": None,
        "audio": None,
        "messages": [ASKED[0] | {"tool_calls": None, "content": [{"type": "text", "text": ASKED[0]["content"]}]}],
    }
    found = served.post({"model": served.name, "messages": ASKED, "max_tokens": 8, "temperature": 0} | neutral)
    assert found[0] == 200
    assert found[2]["choices"][0]["message"]["content"] == served.plain_text()


class Blanks(PreTrainedTokenizerFast):
    """A tokenizer whose texts end in blanks and hold characters of several tokens."""

    def decode(self, token_ids, **kwargs):
        data = bytes([b"a", b" ", b"\n", b"\xc3", b"\xa4", b"\xf0", b"\x9f", b"\x8d"][int(t) % 8][0] for t in token_ids)
        return data.decode(errors="replace")


def test_streamed_text_is_the_whole_text(served):
    worker, tokenizer = served.server._worker, served.server._worker._tokenizer
    worker._tokenizer = Blanks(tokenizer_object=tokenizer.backend_tokenizer)
    try:
        ends = set()
        for seed in range(4):
            asked = {"seed": seed, "temperature": 2, "max_tokens": 20}
            whole = served.chat(**asked).choices[0].message.content
            expected = served.plain(seed=seed, do_sample=True, temperature=2.0, max_new_tokens=20)
            assert whole == worker._tokenizer.decode(expected)
            assert streamed(served.chat(stream=True, **asked))[0] == {0: whole}
            ends.add(whole[-1])
        assert ends & {" ", "\n", "\ufffd"}
    finally:
        worker._tokenizer = tokenizer
