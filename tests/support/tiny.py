"""Tiny random models and prompts for the tests: float32, seeded, milliseconds per pass."""

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specdec import Context, DraftTree, HybridProposer, Proposer
from specdec.proposers.pacing.pacer import Pacer

PAD, VOCAB, WINDOW = 0, 64, 6
DEVICE = "cpu"  # of models and prompts; "cuda" under `pytest --device pretend`
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
OLD = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "eos_token_id": None,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": BASE,
    "qwen3": BASE | {"head_dim": 8},
    "gemma3": BASE | {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": WINDOW},
    "mistral": BASE | {"sliding_window": WINDOW},
    "mixtral": BASE | EXPERTS,
    "qwen3_moe": BASE | EXPERTS | {"head_dim": 8},
    "gpt2": OLD,
    "gpt_neox": {k: v for k, v in BASE.items() if k != "num_key_value_heads"},
    "phi": BASE,
    "qwen3_5": BASE
    | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_conv_kernel_dim": 4}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2": BASE | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {name: BASE[name] for name in BASE if not name.startswith("num_a") and not name.startswith("num_k")}
    | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "falcon_h1": BASE
    | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_n_groups": 1, "mamba_d_state": 8}
    | {"mamba_chunk_size": 16, "head_dim": 8},
}
MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}


@functools.cache
def model(name: str, seed: int = 0, **changes) -> PreTrainedModel:
    """The tiny model of a family; the same object for the same arguments."""
    return on_host(name, seed, **changes).to(DEVICE)


def on_host(name: str, seed: int = 0, **changes) -> PreTrainedModel:
    """The same model on the CPU, where it can be trained."""
    config = AutoConfig.for_model(MODEL_TYPES.get(name, name), **CONFIGS[name] | changes)
    return randomised(config, seed)


def randomised(config, seed: int = 0) -> PreTrainedModel:
    """A model of random weights that ends nothing on its own and whose greedy output varies.

    As initialised, a tiny model gives all tokens nearly the same logits. Matrices are scaled up; where embeddings
    are tied to the head, scaling them too makes a model repeat its last token.
    """
    candidates = []
    for matrices, embeddings in ((4, 4), (8, 1), (16, 1), (2, 2)):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(copy.deepcopy(config)).float().eval()
        made.generation_config.pad_token_id, made.generation_config.eos_token_id = PAD, None
        tables = {id(module.weight) for module in made.modules() if isinstance(module, torch.nn.Embedding)}
        with torch.no_grad():
            for weight in made.parameters():
                if weight.dim() >= 2:
                    weight.mul_(embeddings if id(weight) in tables else matrices)
        candidates.append((_variety(made), made))
        if candidates[-1][0] > 8:
            break
    return max(candidates, key=lambda candidate: candidate[0])[1]


def _variety(model: PreTrainedModel) -> int:
    """Different tokens among the first 16 written."""
    try:
        output = model.generate(prompts(9)["input_ids"].cpu(), do_sample=False, max_new_tokens=16)
    except Exception:  # plain decoding is out of order: whoever uses this model will see
        return 0
    return len(output[0, 9:].unique())


def letters() -> PreTrainedTokenizerFast:
    """One letter a token, for all tokens of the tiny models; token 0 pads."""
    alphabet = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(alphabet)}, unk_token="_"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="_", padding_side="left")


def prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Left-padded random prompts of these lengths; each repeats itself, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(ids, lengths, strict=True):
        phrase = torch.randint(1, vocab, (length // 2 + 1,), generator=generator)
        row[len(row) - length :] = phrase.repeat(2)[:length]
    return {"input_ids": ids.to(DEVICE), "attention_mask": (ids != PAD).long().to(DEVICE)}


class Garbage(Proposer):
    """Drafts random tokens: chains, trees of any shape and nothing, in turn. The output must not change.

    Args:
        answer: (B, T) what plain decoding wrote. Given it, three of four drafted tokens are right.
    """

    def __init__(self, seed: int = 0, size: int = 5, answer: Tensor | None = None):
        self.seed, self.size, self.answer = seed, size, answer

    def begin(self, context: Context) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def propose(self, context: Context) -> DraftTree:
        most = min(self.size, context.pacer.limit)
        chain = context.chains_only or self._number(2) > 0
        rows = [self._row(context, b, most, chain) for b in range(context.batch_size)]
        tokens, parents = (torch.tensor(part, device=context.tokens.device).long() for part in zip(*rows, strict=True))
        return DraftTree(torch.cat([context.root[:, None], tokens], 1), parents, chain=chain)

    def _row(self, context: Context, b: int, most: int, chain: bool) -> tuple[list[int], list[int]]:
        budget = min(context.budget[b], self._number(most)) if context.active[b] else 0
        tokens, parents, depth = [], [-1], [0]
        for node in range(1, most + 1):
            parent = node - 1 if chain else self._number(node - 1)
            fits = depth[parent] < budget and (parent == 0 or parents[parent] >= 0)
            parents.append(parent if fits else -1)
            depth.append(depth[parent] + 1 if fits else 0)
            tokens.append(self._token(context, b, depth[-1]))
        return tokens, parents

    def _token(self, context: Context, b: int, depth: int) -> int:
        column = context.ends[b] - 1 + depth
        if self.answer is not None and column < self.answer.shape[1] and self._number(3):
            return int(self.answer[b, column])
        return self._number(context.vocab_size - 1)

    def _number(self, most: int) -> int:
        return int(torch.randint(most + 1, (), generator=self.generator))


def lone_row(tokens: Tensor, end: int, pacer: Pacer, *, budget: int, vocab_size: int) -> Context:
    """What a proposer that needs no model is shown of a single row, tokens (1, T), of which `end` are there."""
    return Context(
        tokens=tokens,
        pads=[0],
        ends=[end],
        active=[True],
        budget=[budget],
        sampling=False,
        chains_only=False,
        vocab_size=vocab_size,
        pacer=pacer,
    )


@contextmanager
def specdec_warnings() -> Iterator[list[str]]:
    """Collects what specdec warns of meanwhile."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if str(w.message).startswith("specdec:")]


class TakingTurns(HybridProposer):
    """N-grams in every second round, whatever they promise."""

    turn = 0

    def _lookup_pays(self, gains, rounds, context):
        self.turn += 1
        return self.turn % 2 == 0
