"""Conversations and texts, from files to tokens."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig

from specdec.cli.measuring import encoded
from specdec.data.conversations import encode_prompt, read_texts
from specdec.data.entries import read_entries
from specdec.data.messages import Conversation, parse_conversation, read_prompts
from specdec.data.prompts import Prompt
from specdec.data.survey import _lasting
from specdec.models.introspection import marks_of
from specdec.training.corpus import corpus, write_corpus
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from tests.support import pictured, tiny
from tests.support.training import (
    words,
    written,
)

SHOWN = [
    {"role": "user", "content": [{"type": "image", "url": "x.png"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]},
]
PARTS = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ 'z' if part.type == 'image' else part.text }} {% endfor %}{% endif %}"
    " <end> \n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_every_format_is_read(tokenizer, name, tmp_path):
    path = written(
        tmp_path / name,
        {"prompt": "a b", "response": "c d"},
        {"prompt": "a b", "response": "c d", "finish": "length"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b c"},
                {"role": "user", "content": "d"},
                {"role": "assistant", "content": "e"},
                {"role": "user", "content": "f"},
            ]
        },
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]},
        "",
        {"text": "a b c d"},
    )
    texts = list(read_texts(path, tokenizer, 100))
    shown = [(words(tokenizer, text.ids), words(tokenizer, text.ids[text.learn])) for text in texts]
    assert shown == [
        ("<user> a b <end> <assistant> c d <end>", "c d <end>"),
        ("<user> a b <end> <assistant> c d", "c d"),
        (
            "<system> s <end> <user> a <end> <assistant> b c <end> <user> d <end> <assistant> e <end>",
            "b c <end> e <end>",
        ),
        ("<user> a <end> <assistant> b c <end>", "b c <end>"),
        ("a b c d", "a b c d"),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty: one JSON object per line"),
        ([{"text": "a b c"}, "{broken"], "line 2 is not JSON"),
        (['{"text": "a"', {"text": "b"}], "line 1 is not JSON: .* at column 13"),
        ([{"text": "a"}, "[" * 5000 + "]" * 5000], "line 2 cannot be read: its JSON is nested too deeply"),
        (["[" * 5000 + "]" * 5000], "line 1 cannot be read: its JSON is nested too deeply"),
        (["[1]"], "entry 0: expected"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: the conversation has no answer"),
        ([{"messages": [{"role": "robot", "content": "a"}]}], "line 1: a message needs a role"),
        ([{"prompt": "a", "response": "", "finish": "length"}], "line 1: the response is empty"),
        ([{"question": "a"}], "line 1: expected"),
        ([{"text": 5}], "line 1: text must be a string"),
        ([{"prompt": 5, "response": "a"}], "line 1: prompt must be a string"),
        ([{"messages": 5}], "line 1: messages must be a list"),
        ([{"messages": [{"role": ["user"], "content": "a"}]}], "line 1: a message needs a role"),
        (
            [{"messages": [{"role": "user", "content": ["a"]}]}],
            "and a content, which is a string or a list of parts with a",
        ),
        (
            [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}],
            "and a content, which is a string or a list of parts",
        ),
        ([{"messages": SHOWN}], "line 1: .* the chat template inserts none of the target's placeholders for them"),
    ],
)
def test_bad_lines_are_named(tokenizer, lines, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(read_texts(written(tmp_path / "data.jsonl", *lines), tokenizer, 100))


HALF = "a \ud800 b"  # of a character
ODD = [
    ("", "expected"),
    ([], "expected"),
    ({}, "expected .*, found nothing"),
    (None, "expected"),
    (5, "expected"),
    ([[{"text": "a"}]], "expected"),
    ({"text": ""}, "the tokenizer returns no tokens for it"),
    ({"text": " \n"}, "the tokenizer returns no tokens for it"),
    ({"text": "a"}, "its first 20 tokens contain nothing to train on"),
    ({"text": None}, "expected .*, found nothing"),
    ({"text": ["a b c"]}, "text must be a string"),
    ({"text": HALF}, "it holds .*half of a character"),
    ({"messages": []}, "messages is empty: expected"),
    ({"messages": [{"role": "user", "content": "a b c"}]}, "the conversation has no answer"),
    ({"messages": [{"role": "assistant", "content": HALF}]}, "it holds .*half of a character"),
    ({"messages": [[]]}, "a message needs a role and a content"),
    ({"messages": [{"role": "user", "content": 5}]}, "a message needs a role"),
    ({"messages": {"role": "user", "content": "a"}}, "messages must be a list"),
    ({"prompt": "a", "response": HALF}, "it holds .*half of a character"),
    ({"prompt": "a", "response": 5}, "response must be a string"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{HALF: "a"}]}, "it holds .*half of a character"),
]


@pytest.mark.parametrize(("entry", "why"), ODD)
def test_odd_entries_are_named_and_the_rest_is_read(tokenizer, entry, why, tmp_path):
    path = written(tmp_path / "data.jsonl", {"text": "a b c"}, json.dumps(entry), {"text": "d e f"})
    with pytest.warns(UserWarning, match=rf"1 of 3 texts were left out:\n  .*data\.jsonl, line 2: {why}") as said:
        texts = list(read_texts(path, tokenizer, 20))
    assert [words(tokenizer, text.ids) for text in texts] == ["a b c", "d e f"]
    assert len(said) == 1
    with pytest.raises(ValueError, match=rf"none of 1 texts can be used:\n  entry 0: {why}"):
        list(read_texts([entry], tokenizer, 20))


def test_of_many_odd_entries_the_first_are_named(tokenizer, tmp_path):
    path = written(tmp_path / "data.jsonl", *[json.dumps({"text": ["a" * 999]})] * 9, {"text": "a b c"})
    with pytest.warns(UserWarning, match="line 3: .*\n  and 6 more$") as said:
        assert len(list(read_texts(path, tokenizer, 20))) == 1
    assert len(str(said[0].message)) < 1500


ARRAY = [
    {"text": "a b c"},
    {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e f"}]},
    5,
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.json.gz"])
def test_a_file_may_be_one_array(tokenizer, name, indent, tmp_path):
    path = written(tmp_path / name, "", json.dumps(ARRAY, indent=indent), "")
    with pytest.warns(UserWarning, match=rf"1 of 3 texts were left out:\n  .*{name}, entry 2: expected"):
        texts = [words(tokenizer, text.ids) for text in read_texts(path, tokenizer, 20)]
    assert texts == ["a b c", "<user> d <end> <assistant> e f <end>"]
    assert len(list(read_prompts(written(path, json.dumps(ARRAY[1:2], indent=indent))))) == 1
    with pytest.raises(ValueError, match="is empty"):
        list(read_texts(written(path, "[]"), tokenizer, 20))


def test_an_array_that_is_broken_is_said_with_its_line(tokenizer, tmp_path):
    path = written(tmp_path / "data.json", "[", '{"text": "a b c"},', '{"text": "a b c"', "]")
    with pytest.raises(ValueError, match=r"data\.json, line 4 is not JSON: Expecting ',' delimiter at column 1"):
        list(read_texts(path, tokenizer, 20))


def test_messages_may_be_a_prompt_and_its_completion(tokenizer):
    """As TRL has them."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}
    [text] = read_texts([{"prompt": [user], "completion": [answer]}], tokenizer, 20)
    assert words(tokenizer, text.ids) == "<user> a <end> <assistant> b c <end>"
    assert words(tokenizer, text.ids[text.learn]) == "b c <end>"
    [(_, asked)] = read_prompts([{"prompt": [user]}])
    assert asked.messages == [user]
    with pytest.raises(ValueError, match="completion must be a list of messages because prompt is one, got 'b'"):
        list(read_texts([{"prompt": [user], "completion": "b"}], tokenizer, 20))


def test_roles_have_several_names():
    function = {"name": "t", "arguments": "{}"}
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "t", "content": "c"},
    ]
    asked = parse_conversation({"messages": messages}).messages
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    assert asked[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def test_the_first_texts_are_the_first_usable_ones(tokenizer, tmp_path):
    path = written(tmp_path / "data.jsonl", "[]", {"text": "a b c"}, {"text": ""}, {"text": "d e f"}, {"text": "g h i"})
    with pytest.warns(UserWarning, match="2 of 4 texts were left out"):
        texts = list(read_texts(path, tokenizer, 20, limit=2))
    assert [words(tokenizer, text.ids) for text in texts] == ["a b c", "d e f"]


def test_plain_texts_that_are_odd_have_lines(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a b c\n\n\nd\n \ne f\n\ng\n")
    with pytest.warns(UserWarning, match=r"a\.txt, line 8: its first 20 tokens") as said:
        texts = list(read_texts(tmp_path / "a.txt", tokenizer, 20))
    assert [words(tokenizer, text.ids) for text in texts] == ["a b c", "d e f"]
    assert len(said) == 1
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"a \xff")
        with pytest.raises(ValueError, match=rf"{name} is not text in UTF-8"):
            list(read_texts(tmp_path / name, tokenizer, 20) if name == "a.txt" else read_prompts(tmp_path / name))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("", "expected"),
        (None, "expected"),
        ({"prompt": None}, "expected"),
        ({"prompt": " "}, "the conversation asks nothing"),
        ({"prompt": HALF}, "it holds .*half of a character"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the conversation asks nothing"),
    ],
)
def test_prompts_that_ask_nothing_are_named_and_the_rest_is_asked(entry, why, tmp_path):
    path = written(tmp_path / "prompts.jsonl", {"prompt": "a"}, json.dumps(entry), {"prompt": "b"})
    with pytest.warns(UserWarning, match=rf"1 of 3 prompts were left out:\n  .*line 2: {why}"):
        found = [(number, asked.messages[0]["content"], asked.place) for number, asked in read_prompts(path)]
    assert found == [(0, "a", f"{path}, line 1"), (2, "b", f"{path}, line 3")]
    with pytest.raises(ValueError, match=rf"none of 1 prompts can be used:\n  .*line 1: {why}"):
        list(read_prompts(written(path, json.dumps(entry))))


def test_prompts_of_no_tokens_are_refused(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer returns no tokens for the prompt"):
        Prompt("blank", " ").encode(plain)
    blank, usual = (Conversation([{"role": "user", "content": text}], place=text) for text in ("\t", "a b"))
    with pytest.warns(UserWarning, match="1 of 2 prompts were left out:\n  \t: the tokenizer returns no tokens for it"):
        assert len(encoded([blank, usual], plain, tiny.model("llama"), 4)) == 1


def test_a_file_cut_short_is_named(tokenizer, tmp_path):
    path = written(tmp_path / "data.jsonl.gz", *[{"text": "a b c"}] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"data\.jsonl\.gz is not text .* in a complete gzip file"):
        list(read_texts(path, tokenizer, 100))


def test_a_byte_order_mark_is_no_text(tokenizer, tmp_path):
    """Editors of Windows write one."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "p.txt").write_bytes(mark + b"one\n")
    (tmp_path / "p.jsonl").write_bytes(mark + b'{"prompt": "one"}\n')
    for name in ("p.txt", "p.jsonl"):
        assert [asked.messages[0]["content"] for _, asked in read_prompts(tmp_path / name)] == ["one"]


def test_prompts_may_be_lines(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert [asked.messages for _, asked in read_prompts(tmp_path / "p.txt")] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(ValueError, match="one prompt per line"):
        list(read_prompts(tmp_path / "p.txt"))


def test_a_template_that_refuses_a_conversation_is_said_with_its_line(tokenizer, tmp_path):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system messages') }}"
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    path = written(tmp_path / "data.jsonl", {"messages": messages})
    with pytest.raises(ValueError, match="line 1: the conversation does not fit the chat template: no system messages"):
        list(read_texts(path, strict, 100))
    with pytest.raises(ValueError, match="does not fit the chat template"):
        encode_prompt(messages[:2], strict)


def test_what_is_lost_of_long_texts_is_said(tokenizer, tmp_path):
    path = written(
        tmp_path / "d.jsonl", {"text": "a b c d e f"}, {"prompt": "a", "response": "b c d"}, {"text": "a b c"}
    )
    with pytest.warns(UserWarning, match="2 of 3 texts are longer than 5 tokens and were cut, which lost 4 tokens"):
        assert [len(text.ids) for text in read_texts(path, tokenizer, 5)] == [5, 5, 3]


def test_what_is_lost_of_the_first_texts_is_said(tokenizer, files, tmp_path):
    entries = [{"text": "a b c d e f"}, {"text": "a"}, {"text": "a b c"}, "{not read"]
    data, folder = written(tmp_path / "data.jsonl", *entries), RunFolder(tmp_path / "out")
    recipe = Recipe(str(files / "model"), data, folder.path, length=5, max_texts=2, held_out=1)
    with pytest.warns(UserWarning, match="1 of 3 texts are longer than 5 tokens"):
        write_corpus(recipe, folder, tokenizer, "")
    assert [len(texts) for texts in corpus(folder)] == [1, 1]


def test_long_texts_are_cut_and_those_without_anything_to_learn_left_out(tokenizer, tmp_path):
    path = written(tmp_path / "d.jsonl", {"text": "a b c d e f"}, {"prompt": "a b c d e f", "response": "g"})
    with pytest.warns(UserWarning, match="1 of 2 texts were left out"):
        assert [len(text.ids) for text in read_texts(path, tokenizer, 5)] == [5]


def test_without_a_chat_template_a_conversation_is_a_prompt_and_its_answer(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    [text] = read_texts([{"messages": messages, "finish": "length"}], plain, 10)
    assert (words(plain, text.ids), words(plain, text.ids[text.learn])) == ("a b c d", "c d")


def test_an_entry_that_is_nested_too_deeply_is_left_out(tokenizer):
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.warns(UserWarning, match="1 of 2 texts were left out:\n  entry 0: it is nested too deeply"):
        assert len(list(read_texts([{"text": "a", "more": deep}, {"text": "a b c"}], tokenizer, 10))) == 1


def test_plain_texts_and_datasets_are_read(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a b c d\n\ne f g\n")
    assert [words(tokenizer, text.ids) for text in read_texts(tmp_path / "a.txt", tokenizer, 10)] == [
        "a b c d",
        "e f g",
    ]
    rows = [{"text": "a b c"}, {"prompt": "a", "response": "b"}]  # a Dataset yields dictionaries, too
    assert len(list(read_texts(rows, tokenizer, 10))) == 2
    with pytest.warns(UserWarning, match="1 of 2 texts were left out:\n  entry 1: expected"):
        assert len(list(read_texts([{"text": "a b c"}, {"question": "a"}], tokenizer, 10))) == 1


TOLD = "{% if tools %}<system> {% for t in tools %}{{ t.name }} {% endfor %}<end> \n{% endif %}"
TOLD += "{% for m in messages %}<{{ m.role if m.role != 'tool' else 'user' }}> {{ m.content }} "
TOLD += "{% for c in m.tool_calls or [] %}{{ c.name }} {% endfor %}<end> \n{% endfor %}"
TOLD += "{% if add_generation_prompt %}<assistant>{% if not think %} z{% endif %}{% endif %}"


def test_templates_are_told_of_tools_and_switches(tokenizer):
    told = copy.deepcopy(tokenizer)
    told.chat_template = TOLD
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "t"}]},
        {"role": "tool", "content": "b", "name": "t"},
        {"role": "assistant", "content": "c d"},
    ]
    entry = {"messages": messages, "tools": [{"name": "t"}], "chat_template_kwargs": {"think": True}}
    [text] = read_texts([entry], told, 50)
    shown = "<system> t <end> <user> a <end> <assistant> t <end> <user> b <end> <assistant> c d <end>"
    assert words(told, text.ids) == shown
    assert words(told, text.ids[text.learn]) == "t <end> c d <end>"
    with pytest.raises(ValueError, match="renders its answers differently"):  # it begins them with a z, unless told
        list(read_texts([entry | {"chat_template_kwargs": None}], told, 50))

    [(_, asked)] = read_prompts([{"prompt": "a", "chat_template_kwargs": {"think": True}}])
    assert (
        words(told, torch.tensor(encode_prompt(asked.messages, told, **asked.template))) == "<user> a <end> <assistant>"
    )
    [text] = read_texts([{"prompt": "a", "response": "b", "chat_template_kwargs": {"think": True}}], told, 50)
    assert words(told, text.ids) == "<user> a <end> <assistant> b <end>"
    for wrong in ({"tools": {"name": "t"}}, {"chat_template_kwargs": "think"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            list(read_texts([{"messages": messages} | wrong], told, 50))


def calls(*arguments):
    return [{"type": "function", "function": {"name": "t", "arguments": given}} for given in arguments]


UNIFIED = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": calls({"b": "c"}, {"d": ["e"]})},
            {"role": "tool", "name": "t", "content": "f"},
            {"role": "assistant", "content": "g"},
        ],
        "tools": [{"type": "function", "function": {"parameters": {"properties": {"b": {"type": "h"}}}}}],
    },
    {"prompt": "a", "response": "b", "tools": [{"type": "function", "function": {"parameters": {"type": "i"}}}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"text": "a b c"},
]


def test_rows_of_datasets_are_the_entries_they_were_made_of(tokenizer, tmp_path):
    """As rows of one table all have the same keys."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    names = {name for entry in UNIFIED for name in entry}
    rows = datasets.Dataset.from_list([{name: entry.get(name) for name in names} for entry in UNIFIED])
    assert rows[3]["messages"] is rows[3]["tools"] is None
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"b": "c", "d": None}
    rows.save_to_disk(str(tmp_path / "rows"))
    for given in (rows, tmp_path / "rows"):
        assert [entry for _, entry in read_entries(given)] == UNIFIED
        assert len(list(read_texts(given, tokenizer, 50))) == 4


def test_the_splits_of_a_saved_dict_are_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a b"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(ValueError, match=r"holds the splits train, test: give one, for example .*rows/train"):
        list(read_entries(tmp_path / "rows"))
    with pytest.raises(ValueError, match="'train', 'test' is not a sequence of entries"):
        list(read_entries(datasets.DatasetDict({"train": rows, "test": rows})))


def test_checksums_do_not_depend_on_the_process():
    """The text of an image names its address in memory."""

    class Image:
        def __str__(self):
            return f"<PIL.Image.Image image mode=RGB size=2x2 at 0x{id(self):X}>"

    kept = [Image(), Image()]
    assert {_lasting(image) for image in kept} == {"<PIL.Image.Image image mode=RGB size=2x2>"}


def test_several_messages_need_a_chat_template(tokenizer):
    messages, tokenizer = (
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        copy.deepcopy(tokenizer),
    )
    tokenizer.chat_template = None
    assert encode_prompt(messages[1:], tokenizer)
    with pytest.raises(ValueError, match="several messages, but the tokenizer has no chat template"):
        encode_prompt(messages, tokenizer)


def test_nulls_that_were_written_stay(tokenizer):
    """In JSON a call's null is the model's; a call may also be a string."""
    answer = {"role": "assistant", "tool_calls": calls({"b": None}, '{"c": null}')}
    messages = [{"role": "user", "content": "a"}, answer]
    asked = parse_conversation({"messages": messages, "text": None, "tools": None})
    assert [call["function"]["arguments"] for call in asked.messages[1]["tool_calls"]] == [{"b": None}, '{"c": null}']
    assert asked.template == {}


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "a b c", "messages": None, "prompt": None},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}], "text": None},
        {"messages": None, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]},
        {
            "messages": [
                {"role": "user", "from": None, "content": None, "value": "a", "tool_calls": None},
                {"role": None, "from": "gpt", "content": None, "value": "b c", "name": None},
            ]
        },
        {"prompt": "a", "response": "b c", "text": None, "finish": None, "chat_template_kwargs": None},
    ],
)
def test_what_is_null_in_an_entry_is_absent(tokenizer, entry):
    [text] = read_texts([entry], tokenizer, 50)
    assert "b c" in words(tokenizer, text.ids[text.learn])


# Pictures


def test_parts_have_no_keys_of_other_parts():
    """Templates ask whether a part has an image."""
    parts = [{"type": "image", "url": "x.png", "text": None}, {"type": "text", "url": None, "text": "a"}]
    [message] = parse_conversation({"messages": [{"role": "user", "content": parts}]}).messages
    assert message["content"] == SHOWN[0]["content"]


@pytest.fixture
def sees(tokenizer):
    """A tokenizer whose template writes a placeholder, z, for each picture; and that token."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = PARTS
    return made, made.convert_tokens_to_ids("z")


def test_answers_about_a_picture_are_learnt_and_its_placeholder_is_not(sees):
    tokenizer, mark = sees
    picture = [{"type": "image"}, {"type": "text", "text": "d"}]
    entries = [
        {"messages": SHOWN},
        {"messages": [SHOWN[0], {"role": "assistant", "content": picture}]},
        {"text": "a z b"},
    ]
    with pytest.warns(UserWarning, match="3 of 4 texts contain images, videos or audio, which are not read"):
        texts = list(read_texts([*entries, {"text": "a b c"}], tokenizer, 50, [mark]))
    assert [words(tokenizer, text.ids) for text in texts[:3]] == [
        "<user> z a <end> <assistant> b c <end>",
        "<user> z a <end> <assistant> z d <end>",
        "a z b",
    ]
    assert [words(tokenizer, text.ids[text.learn]) for text in texts] == ["b c <end>", "d <end>", "a b", "a b c"]


def test_a_template_for_strings_alone_is_said(sees):
    tokenizer, mark = sees
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="does not fit the chat template: can only concatenate str"):
        list(read_texts([{"messages": SHOWN}], tokenizer, 50, [mark]))


def test_prompts_with_pictures_are_not_answered_without_them():
    with pytest.raises(ValueError, match="entry 0: the conversation contains images, .* be answered without them"):
        list(read_prompts([{"messages": SHOWN[:1]}]))
    [(_, asked)] = read_prompts([{"messages": [{"role": "user", "content": SHOWN[1]["content"]}]}])
    assert asked.messages == [{"role": "user", "content": "b c"}]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "llava"])
def test_what_stands_in_the_place_of_pictures_is_known_by_the_config(name):
    model = pictured.model(name)
    assert int(pictured.prompts(name, 5)["input_ids"].max()) in marks_of(model.config)
    assert not marks_of(tiny.model("llama").config)


def test_a_run_learns_no_placeholder_of_its_targets(sees, files, tmp_path):
    tokenizer, mark = sees
    config = AutoConfig.from_pretrained(files / "model")
    config.image_token_id = mark
    config.save_pretrained(tmp_path / "model")
    data = written(tmp_path / "data.jsonl", *[{"messages": SHOWN}, {"text": "a z b"}] * 2)
    folder = RunFolder(tmp_path / "out")
    with pytest.warns(UserWarning, match="Placeholders are not trained on"):
        write_corpus(Recipe(str(tmp_path / "model"), data, folder.path, held_out=2), folder, tokenizer, "")
    for texts in corpus(folder):
        assert [words(tokenizer, text.ids[text.learn]) for text in texts] in (["b c <end>"] * 2, ["a b"] * 2)
