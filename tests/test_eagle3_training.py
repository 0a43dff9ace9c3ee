"""Training data, cached states and the objective of EAGLE-3 heads."""

import gzip
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainingArguments
from typer.testing import CliRunner

from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.cli import app
from specdec.eagle3 import load, states
from specdec.eagle3.objective import Objective, frequent_tokens
from specdec.eagle3.recipe import last_checkpoint
from specdec.eagle3.states import StateDataset, collate, extract
from specdec.eagle3.texts import Text, read_texts
from specdec.eagle3.trainer import Eagle3Trainer, convert
from tests import eagle3, tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> \n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "<system>", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def written(path, *entries):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def words(tokenizer, ids):
    return " ".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


# Texts


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
        (["[1]"], "line 1: expected"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: the conversation has no answer"),
        ([{"messages": [{"role": "robot", "content": "a"}]}], "line 1: a message needs a role"),
        ([{"prompt": "a", "response": "", "finish": "length"}], "line 1: the response is empty"),
        ([{"question": "a"}], "line 1: expected"),
    ],
)
def test_bad_lines_are_named(tokenizer, lines, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(read_texts(written(tmp_path / "data.jsonl", *lines), tokenizer, 100))


def test_long_texts_are_cut_and_those_without_anything_to_learn_left_out(tokenizer, tmp_path):
    path = written(tmp_path / "d.jsonl", {"text": "a b c d e f"}, {"prompt": "a b c d e f", "response": "g"})
    assert [len(text.ids) for text in read_texts(path, tokenizer, 5)] == [5]


# States


def some_texts(target, count=6, new_tokens=20):
    """Texts that the target wrote itself, of different lengths."""
    out = []
    for i in range(count):
        prompt = tiny.prompts(4 + i, seed=i)["input_ids"]
        ids = target.generate(prompt, do_sample=False, max_new_tokens=new_tokens)[0]
        out.append(Text(ids, torch.arange(len(ids)) >= prompt.shape[1]))
    return out


def test_states_are_the_targets_and_extraction_resumes(tmp_path, monkeypatch):
    target, taps = tiny.model("llama"), (0, 1, 2)
    texts = some_texts(target)
    monkeypatch.setattr(states, "SHARD_TOKENS", 60)
    done = []
    extract(target, texts, taps, tmp_path, batch_tokens=64, progress=done.append)
    assert sum(done) == sum(len(text.ids) for text in texts)
    shards = sorted(tmp_path.glob("states-*.safetensors"))
    assert len(shards) > 2
    before = [shard.stat().st_mtime_ns for shard in shards]
    content = shards[1].read_bytes()
    shards[1].unlink()
    (tmp_path / "states-00001.part").write_bytes(b"half")
    extract(target, texts, taps, tmp_path, batch_tokens=64)
    assert shards[1].read_bytes() == content
    assert [shard.stat().st_mtime_ns for shard in shards if shard != shards[1]] == before[:1] + before[2:]

    dataset = StateDataset(tmp_path, 64)
    assert dataset.num_tokens == sum(len(text.ids) for text in texts)
    wanted = [eagle3.states_of(target, text.ids[None], (*taps, -1))[0].bfloat16() for text in texts]
    found = []
    for row in dataset:
        for document in row["documents"].unique():
            of_it = row["documents"] == document
            found.append((row["ids"][of_it].tolist(), row["learn"][of_it].tolist(), row["states"][of_it]))
    for text, state, (ids, learn, ours) in zip(texts, wanted, found, strict=True):
        assert ids == text.ids.tolist()
        assert learn == text.learn.tolist()
        torch.testing.assert_close(ours, state, rtol=2e-2, atol=2e-2)


def test_rows_are_packed_and_padded(tmp_path):
    target = tiny.model("llama")
    texts = some_texts(target, 5)
    extract(target, texts, (0, 1, 2), tmp_path)
    dataset = StateDataset(tmp_path, 50)
    assert [row["documents"].max().item() for row in dataset] == [1, 0, 0, 0]
    dataset = StateDataset(tmp_path, 60)
    assert len(dataset) == 3
    batch = collate([dataset[0], dataset[2]])
    assert batch["ids"].shape == batch["documents"].shape == batch["states"].shape[:2]
    assert (batch["documents"][1] == -1).sum() == batch["ids"].shape[1] - len(dataset[2]["ids"])
    assert not batch["learn"][1][batch["documents"][1] == -1].any()
    assert all(len(row["ids"]) <= 10 for row in StateDataset(tmp_path, 10))


# Objective


def naive_loss(head, target, text, state, steps, decay):
    """One text, token by token: the naive head's drafts against the target's own distribution."""
    from tests.naive_eagle3 import NaiveHead

    reference = NaiveHead(head.state_dict(), head.config, target.get_input_embeddings().weight)
    lm_head = target.get_output_embeddings().weight.double()[head.draft_to_target]
    ids, taps, final = text.ids.tolist(), state[:, :-32], state[:, -32:].double()
    losses, right = [], []
    for step in range(steps):
        entropies, hits = [], []
        for i in range(len(ids) - 2 - step):
            if not text.learn[i + 2 + step]:
                continue
            drafted = reference.draft(taps[: i + 1], ids[1 : i + 2], ids[i + 2 : i + 2 + step])
            wanted = lm_head @ final[i + 1 + step]
            entropies.append(-(wanted.softmax(-1) * drafted.log_softmax(-1)).sum())
            hits.append(float(wanted.argmax() == drafted.argmax()))
        losses.append(decay**step * sum(entropies) / len(entropies))
        right.append(sum(hits) / len(hits))
    return sum(losses) / sum(decay**step for step in range(steps)), right


@torch.no_grad()
def test_the_objective_is_the_naive_one():
    target, head = tiny.model("llama"), eagle3.head(tap_ids=(0, 1, 2))
    text = some_texts(target, 1, new_tokens=8)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    embedding, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    objective = Objective(head, embedding, lm_head, steps=3, decay=0.7)
    outputs = objective(text.ids[None], text.learn[None], torch.zeros_like(text.ids)[None], state)
    loss, accuracy = naive_loss(head, target, text, state[0], 3, 0.7)
    assert float(outputs["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert outputs["accuracy"].tolist() == pytest.approx(accuracy)


def test_gradients_reach_every_parameter():
    target, head = tiny.model("llama"), eagle3.head("3.1", tap_ids=(0, 1, 2)).train()
    text = some_texts(target, 1)[0]
    state = eagle3.states_of(target, text.ids[None], (0, 1, 2, -1))
    objective = Objective(head, target.get_input_embeddings().weight, target.get_output_embeddings().weight, steps=2)
    objective(text.ids[None], text.learn[None], torch.zeros_like(text.ids)[None], state)["loss"].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in head.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_frequent_tokens():
    ids, learn = torch.tensor([5, 5, 5, 2, 2, 7, 3, 3, 3]), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0])
    best, covered = frequent_tokens([(ids, learn)], 10, 2)
    assert best.tolist() == [2, 5]
    assert covered == pytest.approx(5 / 6)


# Training


@pytest.mark.slow
def test_training_makes_a_head_that_drafts(tmp_path):
    """From nothing to a head that beats what the previous token alone tells."""
    target = tiny.model("llama", num_hidden_layers=4)
    texts = some_texts(target, 16, 40)
    extract(target, texts, (1, 2, 3), tmp_path / "states")
    vocab, covered = frequent_tokens([(text.ids, text.learn) for text in texts], tiny.VOCAB, 40)
    assert covered > 0.8
    torch.manual_seed(0)
    head = convert(target, vocab, tap_ids=(1, 2, 3))
    args = TrainingArguments(
        str(tmp_path / "run"),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        num_train_epochs=300,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_steps=100,
    )
    trainer = Eagle3Trainer(head, target, args, steps=4, train_dataset=StateDataset(tmp_path / "states", 60))
    trainer.train()
    trainer.save_head(tmp_path / "head")
    logged = [entry for entry in trainer.state.log_history if "simulated_length" in entry]
    assert logged[-1]["simulated_length"] > logged[0]["simulated_length"] + 1

    spec = SpeculativeGenerator(target, Eagle3Proposer(load(tmp_path / "head"), branching=(1,) * 4), draft_length=4)
    for i in range(8):
        spec.generate(tiny.prompts(4 + i, seed=i)["input_ids"], do_sample=False, max_new_tokens=40)
    follows = {}  # the bigram baseline, as generous as can be: fitted to the very texts
    for text in texts:
        for one, two in zip(text.ids.tolist(), text.ids.tolist()[1:], strict=False):
            follows.setdefault(one, []).append(two)
    total = sum(map(len, follows.values()))
    bigram = sum(max(map(seen.count, set(seen))) for seen in follows.values()) / total
    assert spec.report.conditional_acceptance_rate_per_pos[0] > bigram
    assert spec.report.mean_acceptance_length > 2.5


# The command


@pytest.fixture(scope="module")
def files(tokenizer, tmp_path_factory):
    """A tiny target with its tokenizer, and texts of its own."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny.model("llama", num_hidden_layers=4)
    target.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = []
    for i in range(12):
        ids = some_texts(target, 1, 16)[0].ids if i == 0 else some_texts(target, 2, 16)[i % 2].ids
        lines.append({"text": " ".join(WORDS[5 + token % 26] for token in ids.tolist())})
    written(folder / "data.jsonl", *lines)
    return folder


def run(files, out, *options):
    small = "--draft-vocab 30 --steps 3 --length 40 --epochs 2 --batch-size 2 --held-out 2 --save-every 2 --device cpu"
    return CliRunner().invoke(
        app, ["train", str(files / "model"), str(files / "data.jsonl"), str(out), *small.split(), *options]
    )


@pytest.mark.slow
def test_the_command_trains_and_takes_up_its_work(files, tmp_path):
    result = run(files, tmp_path)
    assert result.exit_code == 0, result.output
    assert "% of what the target writes" in result.output
    assert "mean acceptance length on held-out prompts" in result.output
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["evaluation"]["mean_acceptance_length"] >= 1
    before = load(tmp_path / "head").state_dict()
    again = run(files, tmp_path)  # everything is done: nothing changes
    assert again.exit_code == 0, again.output
    after = load(tmp_path / "head").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = run(files, tmp_path, "--seed", "1")
    assert other.exit_code == 2
    assert "another recipe (seed was 0, is 1)" in other.output


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(files, tmp_path):
    whole = run(files, tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert run(files, tmp_path / "cut").exit_code == 0
    checkpoints = sorted((tmp_path / "cut" / "run").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    (checkpoints[-1] / "trainer_state.json").write_text("{")  # as if killed while it was written
    assert last_checkpoint(tmp_path / "cut" / "run") == str(checkpoints[-2])
    (tmp_path / "cut" / "head" / "model.safetensors").unlink()
    assert run(files, tmp_path / "cut").exit_code == 0
    one, two = (load(tmp_path / name / "head").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_too_few_texts(files, tmp_path):
    result = run(files, tmp_path, "--held-out", "50")
    assert result.exit_code == 2
    assert "none is left" in result.output
