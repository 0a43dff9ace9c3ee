"""Initial head of a run: a fresh head, a given head to continue training, or another target's head, transferred."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from specdec.data.survey import survey
from specdec.data.texts import Texts
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.export import save
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.kinds import Head, StandAlone
from specdec.heads.loading import load as load_block
from specdec.heads.mtp.loading import load as load_mtp
from specdec.heads.mtp.trainable import MtpTrainee
from specdec.heads.registry import WEIGHTS
from specdec.models.loading import load as load_model
from specdec.proposers.draft_heads.block import BlockProposer
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.training.initialization.dflash import initialize_block
from specdec.training.initialization.draft_vocabulary import frequent_tokens, token_counts
from specdec.training.initialization.eagle3 import initialize, with_vocabulary
from specdec.training.initialization.head_transfer import transfer_head
from specdec.training.initialization.mtp import initialize_mtp
from specdec.training.recipe import DRAFT_VOCAB, Recipe
from specdec.training.run_folder import RunFolder

TRANSFER_TOKENS = 10  # per entry of the states that a transferred head reads; with 4, 0.16 fewer tokens are accepted


def given_head(recipe: Recipe) -> StandAlone | None:
    """Load the head that a recipe continues training, if any. MTP layers are loaded later, for their target.

    Raises:
        ValueError: The head cannot be trained, or contradicts the recipe.
    """
    if recipe.start_from is None:
        return None
    for part, option, given in (
        ("MLP", "--intermediate-size", recipe.intermediate_size is not None),
        ("layers", "--layers", recipe.layers is not None),
        ("attention", "--no-attention-bias", not recipe.attention_bias),
    ):
        if given:
            raise ValueError(f"the head of --from keeps its {part}: leave out {option}")
    if recipe.kind == "mtp":
        return None
    if recipe.kind != "eagle3":
        return _given_drafter(recipe, recipe.start_from)
    head = load(recipe.start_from)
    if head.config.version != 3:
        raise ValueError(f"{recipe.start_from} is an EAGLE-1 or EAGLE-2 head: only EAGLE-3 heads can be trained")
    return head


def _given_drafter(recipe: Recipe, path: str) -> DFlashHead:
    head = load_block(path)
    if not isinstance(head, DFlashHead) or head.config.kind != recipe.kind:
        raise ValueError(f"{path} is not a {recipe.kind} drafter: choose another --kind")
    if head.lm_head is None:
        raise ValueError(f"{path} uses its target's LM head, but only drafters with their own can be trained")
    if head.config.is_scaled:
        raise ValueError(f"{path} scales its embeddings or logits, which is not trained: choose another drafter")
    if recipe.drafted > head.config.drafted:
        raise ValueError(
            f"{path} drafts {head.config.drafted} tokens, --steps is {recipe.drafted}: choose a smaller --steps"
        )
    if recipe.draft_vocab is not None:
        raise ValueError(
            f"{path} keeps its draft vocabulary of {head.config.draft_vocab_size} tokens: leave out --draft-vocab"
        )
    return head


def starting_head(
    recipe: Recipe,
    given: StandAlone | None,
    target: PreTrainedModel,
    corpus: tuple[Texts, Texts],
    folder: RunFolder,
    processes: PartialState,
) -> Head:
    """Return the head before its first update.

    Args:
        recipe: options of the run.
        given: head loaded by `given_head`.
        target: model to draft for.
        corpus: training texts, from which the draft vocabulary is chosen, and held-out texts, on which it is measured.
        folder: folder of the run, where a transferred head is saved.
        processes: processes that share the run.
    """
    torch.manual_seed(recipe.seed)
    texts, held_out = corpus
    size = target.config.get_text_config(decoder=True).vocab_size
    written, read = token_counts(texts, size), token_counts(texts, size, all_tokens=True)
    head: Head
    if given is None:
        head = _fresh(recipe, target, written, read)
    elif isinstance(given, DFlashHead):
        BlockProposer(given).check(target)
        head = given
    else:
        if recipe.start_from_target is None:
            Eagle3Proposer(given).check(target)
        else:
            given = _transferred(recipe, given, recipe.start_from_target, target, texts, folder, processes)
        head = given if recipe.draft_vocab is None else _revised(given, recipe.draft_vocab, target, written, read)
    ids = head.draft_to_target
    assert ids is not None
    if processes.is_main_process:
        print(coverage(ids, written, token_counts(held_out, size), len(held_out)))
        print(survey(recipe.data, recipe.held_out_data).origin(recipe.target))
    return head


def coverage(ids: Tensor, trained: Tensor, held_out: Tensor, texts: int) -> str:
    """Say which share of the answers' tokens a draft vocabulary covers.

    Args:
        ids: (K,) int64, the draft vocabulary.
        trained: (V,) int64, counts of the tokens in the answers trained on.
        held_out: (V,) int64, counts in the answers of held-out texts, from which the vocabulary was not chosen.
        texts: number of held-out texts.

    Examples:
        >>> coverage(torch.tensor([0, 2]), torch.tensor([3, 0, 5, 2]), torch.tensor([1, 1, 2, 0]), 2)
        'the draft vocabulary of 2 tokens covers 75.0% of the tokens in 2 held-out answers (80.0% in those trained on)'
    """
    shares = [100 * float(counts[ids].sum() / counts.sum().clamp(min=1)) for counts in (held_out, trained)]
    return (
        f"the draft vocabulary of {len(ids)} tokens covers {shares[0]:.1f}% of the tokens in {texts} held-out answers "
        f"({shares[1]:.1f}% in those trained on)"
    )


def _revised(head: Eagle3Head, size: int, target: PreTrainedModel, written: Tensor, read: Tensor) -> Eagle3Head:
    """Change the draft vocabulary of a head. One that is enlarged keeps its own tokens."""
    known = head.config.vocab_size
    counts = written[:known]
    if size > len(head.draft_to_target):
        counts = counts.index_fill(0, head.draft_to_target, written.sum() + 1)
    return with_vocabulary(head, target, frequent_tokens(counts, size, read[:known]))


def _fresh(recipe: Recipe, target: PreTrainedModel, written: Tensor, read: Tensor) -> Head:
    """Create a head, or load MTP layers. written, read: (V,) int64, counts of tokens in answers and of all tokens."""
    drafts, changes = frequent_tokens(written, recipe.draft_vocab or DRAFT_VOCAB, read), fresh_changes(recipe)
    if recipe.kind == "mtp":
        drafts = torch.arange(len(written)) if recipe.draft_vocab is None else drafts
        if recipe.start_from is not None:
            return MtpTrainee(load_mtp(target, recipe.start_from).layers, drafts)
        return initialize_mtp(target, drafts, recipe.layers or 1)
    if recipe.kind != "eagle3":
        return initialize_block(target, drafts, _rarest(read), recipe.kind, recipe.drafted, **changes)
    return initialize(target, drafts, **changes)


def fresh_changes(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's changes to a fresh head's config, see `initialize`."""
    changes = {"intermediate_size": recipe.intermediate_size, "num_layers": recipe.layers}
    if recipe.kind == "eagle3" and not recipe.attention_bias:
        changes["attention_bias"] = False
    return {name: value for name, value in changes.items() if value is not None}


def _rarest(read: Tensor) -> int:
    """Return the rarest token in the texts; of several the last, which may pad the vocabulary."""
    return len(read) - 1 - int(read.flip(0).argmin())


def _transferred(
    recipe: Recipe,
    head: Eagle3Head,
    donor_name: str,
    target: PreTrainedModel,
    texts: Texts,
    folder: RunFolder,
    processes: PartialState,
) -> Eagle3Head:
    """Transfer another target's head to this target, once, and keep it in the folder."""
    kept = folder.transferred
    ours = folder.identity() is not None  # otherwise a head there may be from a run with other options
    if processes.is_main_process and not (ours and (kept / WEIGHTS).exists()):
        its, mine = (AutoTokenizer.from_pretrained(name).get_vocab() for name in (donor_name, recipe.target))
        if its != mine:
            raise ValueError(
                f"{donor_name} and {recipe.target} have different tokens, so a head of one cannot be transferred to "
                "the other: choose a model of the same family, or leave out --from to train a fresh head"
            )
        donor = load_model(donor_name).to(target.device)
        width = 3 * target.config.get_text_config(decoder=True).hidden_size
        enough = texts[:: max(1, len(texts.ids) // (TRANSFER_TOKENS * width))]
        print(f"transferring {recipe.start_from} from {donor_name}: both models read {len(enough)} texts")
        with folder.readable_errors("use a shorter --length"):
            save(transfer_head(head, donor, target, enough), kept)
    processes.wait_for_everyone()
    return load(kept)
