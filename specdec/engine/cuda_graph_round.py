"""`CapturedRound`: target pass, verification and cache update of a round, captured as one CUDA graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from specdec.engine.transcript import Transcript
from specdec.engine.verifier import BatchedVerifier
from specdec.models.cuda_graphs import WARM, Named, Recorder
from specdec.models.draft_attention import skips_empty_slots
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import nodes_of_size
from specdec.proposers.draft_models.cuda_graph_drafts import WIDTHS
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import NewTokens, RoundResult, features_at
from specdec.utils.device_copies import HOST, moved

SELDOM = 4  # a size wanted in at most so many rounds of a call is padded to a captured one instead
Shape = tuple[bool, int | None]  # of a draft: `chain` and `levels`


@dataclass
class CapturedRound:
    """Captures and replays the rounds of one call whose result depends on tensors only.

    Args:
        target: runner of the target, with padded pass sizes (`ModelRunner(sized=True)`).
        verify: the call's verifier.
        recorder: captures and replays functions.
    """

    target: ModelRunner
    verify: BatchedVerifier
    recorder: Recorder
    _wanted: dict[Shape, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # rounds by size
    _run: dict[Shape, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # by padded size

    @classmethod
    def of(cls, target: ModelRunner, verify: object, recorder: Recorder | None) -> CapturedRound | None:
        """Make the captured pass of a call; None without a recorder or with another verifier."""
        return cls(target, verify, recorder) if recorder is not None and isinstance(verify, BatchedVerifier) else None

    def takes(self, draft: DraftTree, text: Transcript) -> bool:
        """Return True if this round can be captured: its result depends on tensors only."""
        known = draft.probs is None and (draft.chain or draft.levels is not None) and all(text.written)
        scores_only = self.verify.processors.read_scores_alone and not text.records.wanted
        scores = len(draft.tokens) * nodes_of_size(draft.size) * self.target.config.vocab_size
        return known and scores_only and not self.recorder.refused and scores <= BatchedVerifier.MOST

    def __call__(self, draft: DraftTree, text: Transcript) -> RoundResult:
        """Launch the round, by a replay if one was captured for its shape."""
        size, target = self._size(draft), self.target
        sizes = target.reserve(size, text.budget if skips_empty_slots(target.device) else None)
        inputs = self._inputs(draft, size, text)
        depths = size if draft.chain or draft.levels is None else min(size, draft.levels + 1)
        noise = self.verify.noise_for(depths, text)
        if noise is not None:
            inputs["noise"] = noise
        key = ("pass", self.verify.processors.names, draft.chain, draft.levels, size, sizes)
        function = partial(self._made, draft.chain, draft.levels, size)
        made = self.recorder(target.cache.addresses, key, function, inputs, {"tokens": size, "parents": size})
        target.replayed([0] * len(draft.tokens), size)
        new_tokens = NewTokens(made["tokens"], made["pads"], made.get("states"))
        path = made["path"], made["accepted"], made["next_token"], made["new"]
        return RoundResult(draft, *path, left_padded=new_tokens)

    def _inputs(self, draft: DraftTree, size: int, text: Transcript) -> dict[str, Tensor]:
        """The tensor inputs of `_made` except the noise. What the host knows is copied to the device at once."""
        roots = [row[-1] for row in text.written]
        known = [self.target.lengths, roots, [draft.size] * len(roots)]
        known += [] if text.deepest is None else [text.deepest]
        columns = torch.tensor(known, dtype=torch.long, device=HOST).T.contiguous()  # (B, 3 or 4)
        device, nodes = text.tokens.device, {"tokens": draft.tokens, "parents": draft.parents}
        if draft.tokens.device == device:
            return {"rows": moved(columns, device)} | nodes
        padded = [nn.functional.pad(given, (0, size - draft.size)) for given in nodes.values()]
        return {"rows": moved(torch.cat([columns, *padded], 1), device)}

    def _size(self, draft: DraftTree) -> int:
        """Number of nodes to pad a draft to: the next size, or a larger captured one while the next is rare.

        A replay over more nodes is faster than an eager pass or a new capture.
        """
        shape, own = (draft.chain, draft.levels), nodes_of_size(draft.size)
        wanted, run = self._wanted[shape], self._run[shape]
        wanted[own] += 1
        size = own
        if run[own] <= WARM and wanted[own] <= SELDOM:
            size = min((nodes for nodes, rounds in run.items() if nodes > own and rounds > WARM), default=own)
        run[size] += 1
        return size

    def _made(
        self,
        chain: bool,
        levels: int | None,
        size: int,
        rows: Tensor,
        tokens: Tensor | None = None,
        parents: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Named:
        """The captured function.

        Args:
            chain: as for `DraftTree`.
            levels: as for `DraftTree`.
            size: N.
            rows: (B, C) int64: the number of the row's tokens in the cache, its last token, the number of nodes that
                count, `Transcript.deepest` unless positions are unlimited, and tokens and parents (N each) if these
                are not passed as such.
            tokens: (B, N) int64.
            parents: (B, N) int64.
            noise: (B, D, V), see `BatchedVerifier.noise_for`.
        """
        if tokens is None or parents is None:
            rows, tokens, parents = rows.tensor_split((-2 * size, -size), 1)
        lengths, roots, count, *more = rows.split(1, 1)
        node, deepest = torch.arange(size, device=rows.device), more[0] if more else None
        tokens = torch.cat([roots, tokens[:, 1:]], 1)
        parents = torch.where(node < count, parents, -1)
        draft, target = DraftTree(tokens, parents, chain=chain, levels=levels), self.target
        # The depth of a chain's padding is of no account.
        depth = node.expand_as(tokens) if chain else draft.depth
        depth = depth if deepest is None else torch.minimum(depth, deepest)
        with target.on_device(lengths):
            output = target.grow(draft.tokens, depth, None if chain else draft.ancestors, chain=chain)
        result = self.verify.chosen(draft, self.verify.processors(output.logits, list), noise)
        if not chain:
            target.cache.move(lengths, result.path)
        made = {"path": result.path, "accepted": result.accepted, "next_token": result.next_token, "new": result.tokens}
        return made | _new_tokens(result, output.features)


def _new_tokens(result: RoundResult, features: Tensor | None) -> Named:
    """Tensors of a `NewTokens`, from a round's result and the features (B, N, C) of the draft's nodes."""
    most = result.tokens.shape[1]
    pads = most - 1 - result.accepted
    place = (torch.arange(most, device=pads.device) - pads[:, None]).clamp(min=0)  # on the path, (B, D)
    states = None if features is None else features_at(features, result.path.gather(1, place))
    new_tokens = NewTokens(result.tokens.gather(1, place), pads, states).padded(max(WIDTHS[0], nodes_of_size(most)))
    made = {"tokens": new_tokens.tokens, "pads": new_tokens.pads}
    return made if new_tokens.states is None else made | {"states": new_tokens.states}
