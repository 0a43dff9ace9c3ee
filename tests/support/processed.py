"""transformers' own processors for the tiny models that take pictures, made here: nothing is fetched.

Their tokenizers have a token for each letter; the marks have the ids that the models' configs say. No film is ever
shown, and what would read one is a stand-in: the real ones want torchvision.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import transformers as hf
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin
from transformers.video_processing_utils import VideoProcessorMixin

from tests.support import pictured, tiny

LETTERS = "_abcdefghijklmnopqrstuvwxyz .:?\n"
TEMPLATE = (  # a letter for who speaks, each part in its order, and who is to answer
    "{% for message in messages %}{{ message['role'][0] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


# Processors look there for what a part of theirs must be; without torchvision it is missing.
if not hasattr(hf, "VideoProcessorMixin"):
    hf.VideoProcessorMixin = VideoProcessorMixin


class Films(VideoProcessorMixin):
    """In the place of what reads films."""

    model_input_names = ()
    num_frames = fps = None


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Of so many pixels: four fields of random colours, which outlast being made smaller."""
    fields = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(fields).resize((width, height), Image.Resampling.NEAREST)


def processor(name: str, config: PreTrainedConfig) -> ProcessorMixin:
    """The real processor of a model of `pictured`, as small as its config says."""
    return MADE[name](config)


def mark(made: ProcessorMixin) -> str:
    """What stands for a picture in a text."""
    return made.chat_template.partition("'image' %}")[2].partition("{% else")[0]


def _tokenizer(placed: dict[str, int], named: dict[str, str] | None = None, more: tuple[str, ...] = ()):
    """Letters, and what marks pictures.

    Args:
        placed: marks that the model knows, with their ids. named: which of them the tokenizer has under a name. more:
            marks that are tokens to the model like any other.
    """
    first = len(LETTERS)
    ids = {letter: i for i, letter in enumerate(LETTERS)} | {mark: first + i for i, mark in enumerate(more)} | placed
    made = Tokenizer(models.WordLevel(ids, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens([*more, *placed])
    assert made.get_vocab_size() == len(ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="_", padding_side="left", extra_special_tokens=named or {}
    )
    assert fast.pad_token_id == tiny.PAD
    return fast


def _template(mark: str) -> str:
    return TEMPLATE.replace("PICTURE", mark)


def _by_grid(kind: type[ProcessorMixin], images: type, start: str, mark: str, film: str, end: str):
    def made(config: PreTrainedConfig) -> ProcessorMixin:
        seen = config.vision_config
        first = getattr(config, "vision_start_token_id", None) or config.image_start_token_id
        last = getattr(config, "vision_end_token_id", None) or config.image_end_token_id
        placed = {start: first, mark: config.image_token_id, film: config.video_token_id, end: last}
        side = seen.patch_size * seen.spatial_merge_size
        sizes = {"shortest_edge": 2 * side**2, "longest_edge": 6 * side**2}
        return kind(
            images(
                patch_size=seen.patch_size,
                temporal_patch_size=seen.temporal_patch_size,
                merge_size=seen.spatial_merge_size,
                size=sizes,
            ),
            _tokenizer(placed),
            Films(),
            chat_template=_template(start + mark + end),
        )

    return made


def _gemma3(config: PreTrainedConfig) -> ProcessorMixin:
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    ids = (config.boi_token_index, config.eoi_token_index, config.image_token_index)
    side = config.vision_config.image_size
    return hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size={"height": side, "width": side}),
        _tokenizer(dict(zip(marks.values(), ids, strict=True)), marks),
        chat_template=_template(marks["boi_token"]),
        image_seq_length=config.mm_tokens_per_image,
    )


def _gemma4(config: PreTrainedConfig) -> ProcessorMixin:
    marks = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    marks |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    ids = (config.boi_token_id, config.eoi_token_id, config.image_token_id)
    placed = dict(zip(marks.values(), ids, strict=False)) | {"<|video|>": config.video_token_id}
    sounds = tuple(marks.values())[3:]
    return hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(patch_size=config.vision_config.patch_size, max_soft_tokens=70),
        _tokenizer(placed, marks, sounds),
        Films(),
        chat_template=_template(marks["image_token"]),
        image_seq_length=70,
    )


def _smolvlm(config: PreTrainedConfig) -> ProcessorMixin:
    seen = config.vision_config
    parts = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    more = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>", *parts)
    side = seen.image_size
    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side}),
        _tokenizer({"<image>": config.image_token_id}, more=more),
        Films(),
        image_seq_len=(side // seen.patch_size // config.scale_factor) ** 2,
        chat_template=_template("<image>"),
    )


def _internvl(config: PreTrainedConfig) -> ProcessorMixin:
    marks = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    marks |= {"video_token": "<video>"}
    seen = config.vision_config
    high, wide = seen.image_size
    patches = (high // seen.patch_size[0]) * (wide // seen.patch_size[1])
    return hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size={"height": high, "width": wide}, crop_to_patches=True, max_patches=2),
        _tokenizer({"<IMG_CONTEXT>": config.image_token_id}, marks, ("<img>", "</img>", "<video>")),
        Films(),
        image_seq_length=int(patches * config.downsample_ratio**2),
        chat_template=_template("<IMG_CONTEXT>"),
    )


def _llava(config: PreTrainedConfig) -> ProcessorMixin:
    side = config.vision_config.image_size
    return hf.LlavaProcessor(
        hf.LlavaImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        _tokenizer({"<image>": config.image_token_index}),
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,  # CLIP's first
        chat_template=_template("<image>"),
    )


_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_GLM = ("<|begin_of_image|>", "<|image|>", "<|video|>", "<|end_of_image|>")
MADE: dict[str, Callable[[Any], ProcessorMixin]] = {
    "qwen2_vl": _by_grid(hf.Qwen2VLProcessor, hf.Qwen2VLImageProcessor, *_QWEN),
    "qwen2_5_vl": _by_grid(hf.Qwen2_5_VLProcessor, hf.Qwen2VLImageProcessor, *_QWEN),
    "qwen3_vl": _by_grid(hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, *_QWEN),
    "qwen3_5": _by_grid(hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, *_QWEN),
    "glm4v": _by_grid(hf.Glm4vProcessor, hf.Glm4vImageProcessor, *_GLM),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "llava": _llava,
}
FAMILIES = list(MADE)
BY_ROW = ("gemma3", "gemma4", "smolvlm")  # take the pictures in a list for each row
assert set(FAMILIES) <= set(pictured.FAMILIES)
