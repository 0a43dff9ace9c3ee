"""Tiny models that take pictures, films or sound, and prompts with random ones, as their processors hand them over."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from tests.support import families, tiny

PICTURE = 90  # the token in whose place a piece of a picture goes
GRID = (1, 4, 6)  # frames, rows and columns of patches, of models that take pictures of any shape
SIDE = 32  # pixels, of those that take squares
# How a family's vision part is made small beyond what `families` makes small.
BY_GRID = {
    "qwen2_vl": {},
    "qwen2_5_vl": {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"out_hidden_size": 32},
    "glm4v": {"out_hidden_size": 32},
}
SQUARES = {
    "llava": {"patch_size": 16, "image_size": SIDE},
    "gemma3": {"patch_size": 8, "image_size": SIDE},
    "smolvlm": {"patch_size": 8, "image_size": SIDE},
    "internvl": {"patch_size": (8, 8), "image_size": (SIDE, SIDE)},
}
FAMILIES = [*BY_GRID, *SQUARES, "gemma4"]
FILMS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
FRAMES_APART = ["qwen3_vl", "qwen3_5"]  # a text with the time stands before each frame
MEL, FRAMES = 8, 32
SOUNDS = {  # class, how the part that hears is made small, tokens of a sound, the name of its mask
    "qwen2_audio": (hf.Qwen2AudioForConditionalGeneration, {"max_source_positions": 16}, 8, "feature_attention_mask"),
    "voxtral": (hf.VoxtralForConditionalGeneration, {"max_source_positions": 16, "intermediate_size": 128}, 4, None),
    "audioflamingo3": (
        hf.AudioFlamingo3ForConditionalGeneration,
        {"max_source_positions": 16},
        8,
        "input_features_mask",
    ),
}


def model(name: str, seed: int = 0) -> PreTrainedModel:
    config = _gemma4() if name == "gemma4" else families.tiny_config(name)
    if name in SOUNDS:
        for key, value in (SOUNDS[name][1] | {"num_mel_bins": MEL}).items():
            setattr(config.audio_config, key, value)
        config.get_text_config(decoder=True).vocab_size = families.SMALL["vocab_size"]
        return _made(SOUNDS[name][0], _marked(config), seed)
    text, vision = config.get_text_config(decoder=True), config.vision_config
    for key, value in (BY_GRID.get(name) or SQUARES.get(name) or {}).items():
        setattr(vision, key, value)
    if name in BY_GRID:
        text.rope_parameters["mrope_section"] = [2, 1, 1]  # halves of a head, shared by the planes
    if name == "gemma3":
        config.mm_tokens_per_image, text.sliding_window = 4, 8
    if name == "smolvlm":
        config.scale_factor = 2
    return _made(AutoModelForImageTextToText, _marked(config), seed)


def _gemma4() -> PreTrainedConfig:
    seeing = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8, patch_size=4
    )
    seeing.num_key_value_heads, seeing.position_embedding_size = 2, 64
    text = families.tiny_config("gemma4_text")
    text.use_bidirectional_attention = "vision"
    return hf.Gemma4Config(text_config=text, vision_config=seeing, audio_config=None)


def _marked(config: PreTrainedConfig) -> PreTrainedConfig:
    """With ids of the tiny vocabulary for the tokens in whose place something is shown."""
    marks = [
        key
        for key in config.to_dict()
        if key.endswith(("_token_id", "_token_index")) and key[:3] not in ("pad", "eos", "bos")
    ]
    first = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    for number, key in enumerate(sorted(marks, key=lambda key: not key.startswith(first))):
        setattr(config, key, PICTURE + number)
    return config


def _made(kind: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    made = (kind.from_config(config) if hasattr(kind, "from_config") else kind(config)).float().eval()
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = tiny.PAD, None
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() >= 2:
                weight.mul_(4) if weight.any() else weight.normal_()  # Gemma begins with pictures of zeros
    return made


def prompts(name: str, *lengths: int, pictures: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded: a token before each picture, and the others. lengths: tokens of text in each row."""
    config = families.tiny_config(name)
    generator = torch.Generator().manual_seed(seed)
    size = GRID[1] * GRID[2] // 4 if name in BY_GRID else 4
    width = max(lengths) + pictures * size
    ids = torch.full((len(lengths), width), tiny.PAD)
    for row, length in enumerate(lengths):
        text = torch.randint(2, 80, (length,), generator=generator)
        seen = torch.full((size,), PICTURE)
        parts = [part for at in range(pictures) for part in (text[at : at + 1], seen)]
        ids[row, width - length - pictures * size :] = torch.cat([*parts, text[pictures:]])
    count = pictures * len(lengths)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != tiny.PAD).long()}
    if name in BY_GRID:
        vision = config.vision_config
        patches = count * GRID[1] * GRID[2]
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(patches, values, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([GRID] * count)
        inputs["mm_token_type_ids"] = (ids == PICTURE).long()
    elif name == "gemma4":
        inputs["pixel_values"] = torch.rand(count, 36, 48, generator=generator)
        across = torch.cartesian_prod(torch.arange(6), torch.arange(6))
        inputs["image_position_ids"] = across.expand(count, -1, -1)
        inputs["mm_token_type_ids"] = (ids == PICTURE).long()
    else:
        inputs["pixel_values"] = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        if name == "gemma3":
            inputs["token_type_ids"] = (ids == PICTURE).long()
        if name == "smolvlm":
            inputs["pixel_values"] = inputs["pixel_values"].unflatten(0, (len(lengths), pictures))
    return inputs


def films(name: str, *lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Two frames of four tokens each. lengths: as in `prompts`."""
    config = model(name).config
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths) + 8), tiny.PAD)
    for row, length in enumerate(lengths):
        text = torch.randint(2, 80, (length,), generator=generator)
        seen = torch.full((4,), config.video_token_id)
        between = text[1:2] if name in FRAMES_APART else text[:0]
        ids[row, ids.shape[1] - length - 8 :] = torch.cat([text[:1], seen, between, seen, text[1 + len(between) :]])
    values = config.vision_config.in_channels * config.vision_config.temporal_patch_size
    values *= config.vision_config.patch_size**2
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != tiny.PAD).long(),
        "mm_token_type_ids": 2 * (ids == config.video_token_id).long(),
        "pixel_values_videos": torch.randn(len(lengths) * 2 * 4 * 4, values, generator=generator),
        "video_grid_thw": torch.tensor([(2, 4, 4)] * len(lengths)),
    }
    return inputs | ({"second_per_grid_ts": torch.ones(len(lengths))} if name == "qwen2_5_vl" else {})


def sounds(name: str, *lengths: int, seed: int = 0) -> dict[str, Tensor]:
    _, _, size, mask = SOUNDS[name]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths) + size), tiny.PAD)
    for row, length in enumerate(lengths):
        text = torch.randint(2, 80, (length,), generator=generator)
        ids[row, ids.shape[1] - length - size :] = torch.cat([text[:1], torch.full((size,), PICTURE), text[1:]])
    features = torch.randn(len(lengths), MEL, FRAMES, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": (ids != tiny.PAD).long(), "input_features": features}
    return inputs | ({} if mask is None else {mask: torch.ones(len(lengths), FRAMES, dtype=torch.long)})
