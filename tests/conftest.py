"""Fixtures around the tiny models and prompts of `tests.support.tiny`, and the words of `tests.support.training`."""

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; triton reads this when it is imported

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec.models.cpu_threads import usable_cores
from tests.support import pretend, static, tiny
from tests.support.training import TEMPLATE, WORDS, some_texts, written

if torch.get_num_threads() > usable_cores():  # a container's quota: too many threads are slow, and warned of
    torch.set_num_threads(usable_cores())
    os.environ["OMP_NUM_THREADS"] = str(usable_cores())  # of processes that tests start
os.environ["SPECDEC_KEEP_COSTS"] = "0"  # no test writes into its user's home, or decides by what it finds there


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "pretend"),
        default="cpu",
        help='where tiny models live: "pretend" is a CUDA device played by the CPU (tests/support/pretend.py)',
    )
    parser.addoption(
        "--static", action="store_true", help="passes over drafts as graphs have them (tests/support/static.py)"
    )


def pytest_configure(config):
    if config.getoption("--static"):
        static.switch_on(pytest.MonkeyPatch())
    if config.getoption("--device") == "pretend" and not pretend.missing():
        pretend.install()
        tiny.DEVICE = "cuda"
    if config.getoption("--device") == "cuda":
        tiny.DEVICE = "cuda"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "pretend" and (reason := pretend.missing()):
        for item in items:
            item.add_marker(pytest.mark.skipif(True, reason=reason), append=False)  # before a module's own reason


@pytest.fixture(scope="session")
def models():
    """`models(name, seed=0, **config)`: a tiny random model, made once."""
    return tiny.model


@pytest.fixture
def only_new_objects():
    """For tests that look through all objects: those of earlier tests, which are many, are left out."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def llama(models):
    return models("llama")


@pytest.fixture(scope="session")
def draft(models):
    """Another, smaller model with llama's vocabulary."""
    return models("llama", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def single():
    return tiny.prompts(9)


@pytest.fixture(scope="session")
def ragged():
    """Three rows, left-padded, one of a single token."""
    return tiny.prompts(9, 1, 5)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with the words of `tests.support.training`."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


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


@pytest.fixture(scope="session")
def chat_tokenizer():
    """A character a token, and a chat template."""
    characters = [*"abcdefghijklmnopqrstuvwxyz:|ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"][: tiny.VOCAB]
    inner = Tokenizer(WordLevel({c: i for i, c in enumerate(characters)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '|' }}{% endfor %}a:"
    return made


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
