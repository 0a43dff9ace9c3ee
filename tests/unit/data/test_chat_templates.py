"""What is learnt of answers, token by token, through chat templates of the kinds that are in use."""

import copy

import pytest

from specdec.data.conversations import read_texts
from specdec.data.sequences import extend, fingerprint
from specdec.training.corpus import corpus, write_corpus
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from tests.support import templated, tiny
from tests.support.templated import ids, turns
from tests.support.training import written


def read(tokenizer, *entries, **options):
    """Each text's ids, and those that are learnt."""
    return [
        (text.ids.tolist(), text.ids[text.learn].tolist())
        for text in read_texts(list(entries), tokenizer, 500, **options)
    ]


def as_ids(tokenizer, *texts):
    return [(ids(tokenizer, whole), ids(tokenizer, learned)) for whole, learned in texts]


CHATML = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
HARMONY = "<|start|>user<|message|>a<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
# What becomes of the user's a, the answer "b c", the user's d and the answer "e": texts, and what of each is learnt.
TWO_TURNS = {
    "chatml": [(CHATML + "b c<|im_end|>" + AGAIN + "e<|im_end|>", "b c<|im_end|>e<|im_end|>")],
    "gpt-oss": [
        (HARMONY + FINAL + "b c<|return|>", FINAL + "b c<|return|>"),
        (
            HARMONY + FINAL + "b c<|end|><|start|>user<|message|>d<|end|><|start|>assistant" + FINAL + "e<|return|>",
            FINAL + "e<|return|>",
        ),
    ],
    "llama 3": [
        (
            "<|begin|><|head|>user\n\na<|eot_id|><|head|>assistant\n\nb c<|eot_id|>"
            "<|head|>user\n\nd<|eot_id|><|head|>assistant\n\ne<|eot_id|>",
            "b c<|eot_id|>e<|eot_id|>",
        )
    ],
    "phi-3": [
        (
            "<|user|>\na<|end|>\n<|assistant|>\nb c<|end|>\n<|user|>\nd<|end|>\n<|assistant|>\ne<|end|>",
            "b c<|end|>e<|end|>",
        )
    ],
    "gemma": [
        (
            "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb c<end_of_turn>\n"
            "<start_of_turn>user\nd<end_of_turn>\n<start_of_turn>model\ne<end_of_turn>",
            "b c<end_of_turn>e<end_of_turn>",
        )
    ],
    "without an end": [("user: a\nassistant: b c\nuser: d\nassistant: e", "b ce")],
}
CHATMLS = ("chatml with another end", "strips earlier thinking", "strips all thinking", "generation")
TWO_TURNS |= dict.fromkeys(CHATMLS, TWO_TURNS["chatml"])
END = {"without an end": "", "phi-3": "<|end|>", "gemma": "<end_of_turn>", "chatml with another end": "<|im_end|>"}
END |= {kind: marks[0] for kind, (marks, _) in templated.KINDS.items() if kind not in END}


@pytest.mark.parametrize("kind", TWO_TURNS)
def test_an_answer_is_learnt_up_to_the_token_that_ends_its_turn(kind):
    tokenizer = templated.tokenizer(kind)
    messages, expected = turns("a", "b c", "d", "e"), as_ids(tokenizer, *TWO_TURNS[kind])
    assert read(tokenizer, {"messages": messages}) == expected
    *_, (whole, learned) = expected
    count = len(ids(tokenizer, END[kind]))
    *_, last = read(tokenizer, {"messages": messages, "finish": "length"})
    assert last == (whole[: len(whole) - count], learned[: len(learned) - count])


@pytest.mark.parametrize("kind", templated.KINDS)
def test_a_response_ends_as_answers_in_messages_do(kind):
    tokenizer = templated.tokenizer(kind)
    pair = {"prompt": "a", "response": "b c"}
    [(whole, learned)] = read(tokenizer, pair)
    assert learned == ids(tokenizer, "b c" + END[kind])
    assert tokenizer.decode(whole).endswith("b c" + END[kind])
    [(_, learned)] = read(tokenizer, pair | {"finish": "length"})
    assert learned == ids(tokenizer, "b c")
    [(_, learned)] = read(tokenizer, {"prompt": "a", "response": "b c" + END[kind]})  # it is there already
    assert learned == ids(tokenizer, "b c" + END[kind])


def test_a_response_ends_in_the_tokenizer_s_token_where_the_template_tells_nothing():
    for template in (None, "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"):
        tokenizer = templated.tokenizer("chatml")
        tokenizer.chat_template = template
        [(_, learned)] = read(tokenizer, {"prompt": "a", "response": "b c"})
        assert learned == ids(tokenizer, "b c<|im_end|>")


def test_the_target_s_own_end_tokens_come_first():
    """Where a template writes a mark before the one that ends a turn, which the tokenizer knows nothing of."""
    tokenizer = templated.tokenizer("chatml with another end")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "</a><|im_end|>")
    tokenizer.add_tokens(["</a>"], special_tokens=True)
    entry = {"messages": turns("b", "c")}
    ends = ids(tokenizer, "<|im_end|>")
    assert [learned for _, learned in read(tokenizer, entry)] == [ids(tokenizer, "c</a>")]
    assert [learned for _, learned in read(tokenizer, entry, ends=ends)] == [ids(tokenizer, "c</a><|im_end|>")]


def test_a_run_asks_the_target_s_generation_config_for_its_ends(tmp_path):
    tokenizer = templated.tokenizer("phi-3")
    target = copy.deepcopy(tiny.model("llama", vocab_size=80))
    pairs = [{"prompt": "a", "response": "b c"}] * 2
    plain = templated.tokenizer("phi-3")
    plain.chat_template = None
    target.config.eos_token_id = ids(tokenizer, "<|end|>")[0]
    folder = RunFolder(tmp_path / "out")
    for ends in ("<|user|>", "<|endoftext|>", "<|end|>"):
        target.generation_config.eos_token_id = ids(tokenizer, ends)
        target.save_pretrained(tmp_path / "model")
        if ends == "<|end|>":
            (tmp_path / "model" / "generation_config.json").unlink()
        recipe = Recipe(str(tmp_path / "model"), written(tmp_path / "data.jsonl", *pairs), folder.path, held_out=1)
        write_corpus(recipe, folder, plain, "")
        for texts in corpus(folder):
            assert [text.ids[text.learn].tolist() for text in texts] == [ids(tokenizer, "b c" + ends)]


# Thinking

THOUGHTS = turns("a", "<think>x</think>b", "d", "<think>y</think>e")


def test_an_answer_with_its_thinking_is_learnt_though_later_ones_follow_it_without():
    tokenizer = templated.tokenizer("strips earlier thinking")
    assert read(tokenizer, {"messages": THOUGHTS}) == as_ids(
        tokenizer,
        (CHATML + "<think>x</think>b<|im_end|>", "<think>x</think>b<|im_end|>"),
        (CHATML + "b<|im_end|>" + AGAIN + "<think>y</think>e<|im_end|>", "<think>y</think>e<|im_end|>"),
    )


@pytest.mark.parametrize(("kind", "missed"), [("strips all thinking", 2), ("r1", 3)])
def test_answers_that_a_template_does_not_show_as_they_were_written_are_said(kind, missed):
    """R1's prompt begins them with a mark, which their conversations do not show."""
    tokenizer = templated.tokenizer(kind)
    with pytest.warns(UserWarning, match=f"{missed} of 3 answers in conversations are not trained on"):
        found = read(tokenizer, {"messages": THOUGHTS}, {"messages": turns("a", "c")}, {"prompt": "a", "response": "g"})
    assert [learned for _, learned in found][-1] == ids(tokenizer, "g" + END[kind])
    assert len(found) == 4 - missed


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "x"},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        {"tool_calls": [{"name": "f", "arguments": {}}]},
    ],
)
def test_answers_of_which_a_template_leaves_out_a_part_are_said(more):
    tokenizer = templated.tokenizer("chatml")
    messages = turns("a", "b")
    messages[1] |= more
    with pytest.warns(UserWarning, match="1 of 2 answers in conversations are not trained on"):
        assert len(read(tokenizer, {"messages": messages}, {"messages": turns("a", "b")})) == 1
    [field] = more
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", f"(m.{field} or '') | string + m.content")
    assert len(read(tokenizer, {"messages": messages})) == 1


def test_a_prompt_that_begins_the_answer_is_no_part_of_it():
    tokenizer = templated.tokenizer("generation")
    tokenizer.chat_template = tokenizer.chat_template.replace("<think></think>", "<think>")
    assert read(tokenizer, {"messages": turns("a", "<think>x</think>b")}) == as_ids(
        tokenizer, (CHATML + "<think>x</think>b<|im_end|>", "x</think>b<|im_end|>")
    )


def test_marks_of_what_the_target_writes_come_before_a_comparison():
    """SmolLM3's prompt begins an answer otherwise than the conversation shows it."""
    tokenizer = templated.tokenizer("generation")
    entry = {"messages": turns("a", "b")}
    assert read(tokenizer, entry) == as_ids(tokenizer, (CHATML + "b<|im_end|>", "b<|im_end|>"))
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.warns(UserWarning, match="1 of 1 answers in conversations are not trained on"):
        assert len(read(tokenizer, entry, {"text": "abc"})) == 1


@pytest.mark.parametrize("kind", ["llama 3", "gemma"])
def test_blanks_that_a_template_leaves_out_are_said(kind):
    tokenizer = templated.tokenizer(kind)
    with pytest.warns(UserWarning, match="1 of 2 answers in conversations are trained on without some whitespace"):
        found = read(tokenizer, {"messages": turns("a", " b \n", "d", "e")})
    assert [learned for _, learned in found] == [ids(tokenizer, "b" + END[kind] + "e" + END[kind])]


# Token ids


def test_token_ids_are_read_as_they_were_written():
    """Where the template would refuse the conversation, too; and beside lines without them."""
    tokenizer = templated.tokenizer("gpt-oss")
    thought = "<|channel|>analysis<|message|>x<|end|><|start|>assistant" + FINAL + "b"
    entry = {"id": 0, "messages": turns("a", thought), "tokenizer": fingerprint(tokenizer)}
    sequences = []
    extend(sequences, ids(tokenizer, HARMONY), ids(tokenizer, thought + "<|return|>"))
    found = read(tokenizer, entry | {"sequences": sequences}, {"messages": turns("a", "c")})
    assert found == as_ids(
        tokenizer,
        (HARMONY + thought + "<|return|>", thought + "<|return|>"),
        (HARMONY + FINAL + "c<|return|>", FINAL + "c<|return|>"),
    )
    with pytest.raises(ValueError, match="entry 0: the conversation does not fit .* channel tags in the content"):
        read(tokenizer, entry)
    with pytest.raises(ValueError, match="entry 0: the token ids belong to another tokenizer, and the conversation"):
        read(tokenizer, entry | {"sequences": sequences, "tokenizer": "another"})


def test_token_ids_of_another_tokenizer_are_not_read():
    other, tokenizer = templated.tokenizer("chatml"), templated.tokenizer("phi-3")
    sequences = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}]
    entry = {"messages": turns("a", "b"), "tokenizer": fingerprint(other), "sequences": sequences}
    assert read(other, entry) == [([1, 2, 3, 4], [3, 4])]
    with pytest.warns(UserWarning, match="1 of 2 conversations with token ids were written with another tokenizer"):
        found = read(tokenizer, entry, entry | {"tokenizer": fingerprint(tokenizer)})
    assert found == [
        *as_ids(tokenizer, ("<|user|>\na<|end|>\n<|assistant|>\nb<|end|>", "b<|end|>")),
        ([1, 2, 3, 4], [3, 4]),
    ]


@pytest.mark.parametrize(
    "sequences",
    [
        [1, 2],
        {"input_ids": [1]},
        [{"input_ids": [1, 2]}],
        [{"input_ids": [1, 2], "loss_mask": [1]}],
        [{"input_ids": [1.5, 2], "loss_mask": [0, 1]}],
        [{"input_ids": [-1, 2], "loss_mask": [0, 1]}],
        [{"input_ids": [1, 2], "loss_mask": [0, 2]}],
        [{"input_ids": [], "loss_mask": []}],
    ],
)
def test_broken_token_ids_are_named(sequences):
    tokenizer = templated.tokenizer("chatml")
    entry = {"messages": turns("a", "b"), "tokenizer": fingerprint(tokenizer), "sequences": sequences}
    with pytest.raises(ValueError, match="entry 0: sequences must be a list of objects with input_ids"):
        read(tokenizer, entry)


def test_answers_share_a_sequence_as_long_as_the_prompt_shows_them_unchanged():
    sequences = []
    extend(sequences, [1, 2], [3, 4])
    extend(sequences, [1, 2, 3, 4, 5], [6])
    extend(sequences, [1, 2, 9, 5, 6, 7], [8])
    assert sequences == [
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 1]},
        {"input_ids": [1, 2, 9, 5, 6, 7, 8], "loss_mask": [0, 0, 0, 0, 0, 0, 1]},
    ]
