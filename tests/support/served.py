"""A server in this process with a tiny model, asked by the real `openai` client, and stopped where a test wants it."""

import json
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from threading import Event

import openai
import torch
from transformers import StoppingCriteria

from specdec import SpeculativeGenerator
from specdec.cli.server import serve
from tests.support import tiny

PATIENCE = 60  # seconds, for what takes milliseconds
ASKED = [{"role": "user", "content": "abcabcab"}]


def soon(condition):
    """Wait until a condition holds."""
    for _ in range(100 * PATIENCE):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


class Hold(StoppingCriteria):
    """Stops the worker after so many tokens of each call, or before any, until it is released."""

    def __init__(self):
        self.after, self.arrived, self.released = None, Event(), Event()

    def __call__(self, input_ids, scores, **kwargs):
        self._seen += 1
        self._wait_at(self._seen)
        return torch.tensor([False])

    def begin(self):
        self._seen = 0
        self._wait_at(0)

    def _wait_at(self, seen):
        if seen == self.after:
            self.arrived.set()
            assert self.released.wait(PATIENCE)

    @contextmanager
    def on(self, after=0):
        """Calls stop there within this context."""
        self.after = after
        self.arrived.clear()
        self.released.clear()
        try:
            yield self
        finally:
            self.after = None
            self.released.set()


class Generator(SpeculativeGenerator):
    """A generator that can be held, and that fails where a test wants it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hold, self.failure = Hold(), None

    def generate(self, *args, stopping_criteria=(), **kwargs):
        self.hold.begin()
        if self.failure is not None:
            raise self.failure
        return super().generate(*args, stopping_criteria=[*stopping_criteria, self.hold], **kwargs)


class Served:
    """A server of a tiny model, and its clients."""

    def __init__(self, folder, tokenizer, model=None, proposer=None, **options):
        self.model, self.tokenizer, self.name = model or tiny.on_host("llama"), tokenizer, str(folder)
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        draft = proposer or tiny.on_host("llama", seed=1)
        options = {"port": 0, "dtype": "float32", "device": "cpu"} | options

        def generator_of(loaded):
            self.spec = Generator(loaded, draft, draft_length=3)
            return self.spec

        self.server = serve(self.name, generator_of, non_blocking=True, **options)
        self.url = f"http://localhost:{self.server.port}"
        self.client = self.of("none")

    def of(self, key, **options):
        """The client with this API key."""
        options = {"max_retries": 0, "timeout": PATIENCE} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def chat(self, client=None, **fields):
        fields = {"model": self.name, "messages": ASKED, "max_tokens": 8} | fields
        return (client or self.client).chat.completions.create(**fields)

    def complete(self, client=None, **fields):
        fields = {"model": self.name, "prompt": "abcabcab", "max_tokens": 8} | fields
        return (client or self.client).completions.create(**fields)

    def post(self, body, path="/v1/chat/completions"):
        """Status, headers and JSON of the response to a body of bytes, or of any JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, data))

    def get(self, path):
        return self._open(urllib.request.Request(self.url + path))

    @staticmethod
    def _open(request):
        try:
            response = urllib.request.urlopen(request, timeout=PATIENCE)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return response.status, response.headers, json.loads(response.read())

    @property
    def health(self):
        return self.get("/health")[2]

    def settle(self):
        """Wait until the model is free: tests draw random numbers of their own."""
        soon(lambda: self.health == {"status": "ok", "queue": 0, "busy": False})

    def prompt(self, messages=ASKED):
        """Token ids (1, T) of a conversation."""
        template = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return torch.tensor([template["input_ids"]])

    def plain(self, ids=None, seed=None, **arguments):
        """New tokens of plain `generate()` with these arguments."""
        self.settle()
        ids = self.prompt() if ids is None else ids
        arguments = {"max_new_tokens": 8, "do_sample": False} | arguments
        if seed is not None:
            torch.manual_seed(seed)
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        return output[0, ids.shape[1] :]

    def plain_text(self, *args, **kwargs):
        return self.tokenizer.decode(self.plain(*args, **kwargs), skip_special_tokens=True)


def streamed(stream):
    """Texts, reasons and log probabilities of each choice of a stream, and its usage."""
    texts, reasons, entries, usage = {}, {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.logprobs is not None:
                entries.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, entries, usage
