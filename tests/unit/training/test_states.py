"""The target's states over texts, on disk and on the way, and rows packed of them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.data.packed_dataset import PackedTexts, StateDataset, collate
from specdec.data.texts import Text
from specdec.training.teacher import state_cache
from specdec.training.teacher.base import LocalTeacher
from specdec.training.teacher.state_cache import extract
from specdec.training.teacher.state_extractor import Reader
from tests.support import eagle3, tiny
from tests.support.training import some_texts


def test_states_are_the_targets_and_extraction_resumes(tmp_path, monkeypatch):
    target, taps = tiny.model("llama"), (0, 1, 2)
    texts, teacher = some_texts(target), LocalTeacher(target, taps, batch_tokens=64)
    monkeypatch.setattr(state_cache, "SHARD_TOKENS", 60)
    done = []
    extract(teacher, texts, tmp_path, progress=done.append)
    assert sum(done) == sum(len(text.ids) for text in texts)
    shards = sorted(tmp_path.glob("states-*.safetensors"))
    assert len(shards) > 2
    before = [shard.stat().st_mtime_ns for shard in shards]
    content = shards[1].read_bytes()
    shards[1].unlink()
    (tmp_path / "states-00001.part").write_bytes(b"half")
    extract(teacher, texts, tmp_path)
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


def test_processes_share_the_work(tmp_path, monkeypatch):
    target, taps = tiny.model("llama"), (0, 1, 2)
    texts, teacher = some_texts(target), LocalTeacher(target, taps)
    monkeypatch.setattr(state_cache, "SHARD_TOKENS", 60)
    assert extract(teacher, texts, tmp_path / "alone")
    done = {mine: [] for mine in (1, 0)}
    for mine, parts in done.items():
        whole = extract(teacher, texts, tmp_path / "shared", share=(mine, 2), progress=parts.append)
        assert whole == (mine == 0)  # the last one
        assert whole == (tmp_path / "shared" / "states.json").exists()
    assert all(done.values())
    assert sum(map(sum, done.values())) == sum(len(text.ids) for text in texts)
    alone, shared = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "shared")
    )
    assert alone == shared


def test_what_logits_say_over_all_tokens_is_kept_where_something_is_learnt(tmp_path, monkeypatch):
    target = tiny.model("llama")
    text = some_texts(target, 1)[0]
    monkeypatch.setattr("specdec.training.teacher.target_logits.NUMBERS_AT_ONCE", 3 * tiny.VOCAB)
    extract(LocalTeacher(target, (1,)), [text], tmp_path)
    over_all = StateDataset(tmp_path, 64)[0]["over_all"]
    logits = target(text.ids[None]).logits[0].float()
    wanted = torch.stack([logits.logsumexp(-1), logits.argmax(-1).float()], -1)
    first = int(text.learn.long().argmax()) - 1
    torch.testing.assert_close(over_all[first:-1], wanted[first:-1], rtol=0.02, atol=0.02)
    assert not over_all[:first].any()
    assert not over_all[-1].any()


def test_states_of_an_earlier_version_are_refused(tmp_path):
    target = tiny.model("llama")
    extract(LocalTeacher(target, (1,)), some_texts(target, 1), tmp_path)
    (shard,) = tmp_path.glob("states-*.safetensors")
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != "over_all"}, shard)
    with pytest.raises(ValueError, match="remove this folder"):
        StateDataset(tmp_path, 64)


def test_extraction_takes_fewer_texts_at_once_where_memory_ends(monkeypatch):
    target = tiny.model("llama")
    texts = some_texts(target)
    expected = state_cache.states_of(target, (1,), texts)
    taken, read = [], Reader._pass

    def small(reader, ids):
        taken.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(reader, ids)

    monkeypatch.setattr(Reader, "_pass", small)
    found = state_cache.states_of(target, (1,), texts)
    assert taken[0] > 1
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)
    monkeypatch.setattr(Reader, "_pass", lambda *args: small(None, [0, 0]))
    with pytest.raises(torch.OutOfMemoryError):
        state_cache.states_of(target, (1,), texts)


def test_states_on_the_way_are_those_of_each_document(monkeypatch):
    """Whatever shares a pass, and without padding short documents to the longest."""
    target = tiny.model("llama")
    texts = [*some_texts(target, 2, 30), *(Text(torch.arange(5), torch.ones(5, dtype=torch.bool)) for _ in range(7))]
    batch = collate(list(PackedTexts(texts, 40)))
    computed, read = [], Reader._pass

    def counted(reader, ids):
        computed.append(len(ids) * max(map(len, ids)))
        return read(reader, ids)

    monkeypatch.setattr(Reader, "_pass", counted)
    found = LocalTeacher(target, (1,)).states(batch)["states"]
    assert sum(computed) <= 2 * sum(len(text.ids) for text in texts)
    documents = [
        (row[where], states_of_it[where])
        for row, of, states_of_it in zip(batch["ids"], batch["documents"], found, strict=True)
        for where in (of == number for number in of.unique() if number >= 0)
    ]
    assert len(documents) == len(texts)
    for ids, ours in documents:
        torch.testing.assert_close(ours, eagle3.states_of(target, ids[None], (1, -1))[0], rtol=1e-4, atol=1e-5)


def test_rows_are_packed_and_padded(tmp_path):
    target = tiny.model("llama")
    texts = some_texts(target, 5)
    extract(LocalTeacher(target, (0, 1, 2)), texts, tmp_path)
    dataset = StateDataset(tmp_path, 50)
    assert [row["documents"].max().item() for row in dataset] == [1, 0, 0, 0]
    dataset = StateDataset(tmp_path, 60)
    assert len(dataset) == 3
    batch = collate([dataset[0], dataset[2]])
    assert batch["ids"].shape == batch["documents"].shape == batch["states"].shape[:2]
    assert (batch["documents"][1] == -1).sum() == batch["ids"].shape[1] - len(dataset[2]["ids"])
    assert not batch["learn"][1][batch["documents"][1] == -1].any()
    assert all(len(row["ids"]) <= 10 for row in StateDataset(tmp_path, 10))
