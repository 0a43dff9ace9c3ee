"""Tiny encoder-decoder models, and what their encoders read: texts, sound, pictures."""

import copy
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

PAD, END, VOCAB, FRAMES = 0, 1, 61, 100
IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": 2, "decoder_start_token_id": PAD}
LAYERS: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
LAYERS |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
SOUND = {"num_mel_bins": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 128}
GEMMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}


def _t5gemma() -> PreTrainedModel:
    halves = [T5GemmaModuleConfig(**IDS | GEMMA, num_key_value_heads=1, sliding_window=8) for _ in range(2)]
    config = hf.T5GemmaConfig(
        encoder=halves[0], decoder=halves[1], **{k: v for k, v in IDS.items() if k != "vocab_size"}
    )
    return hf.T5GemmaForConditionalGeneration(config)


def _trocr() -> PreTrainedModel:
    decoder = hf.TrOCRConfig(**IDS, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64)
    encoder = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = hf.VisionEncoderDecoderModel(config)
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        setattr(model.generation_config, name, IDS[name])
    return model


def _whisper() -> PreTrainedModel:
    config = hf.WhisperConfig(
        **IDS | LAYERS | SOUND, suppress_tokens=None, begin_suppress_tokens=None, median_filter_width=3
    )
    model = hf.WhisperForConditionalGeneration(config)
    known = {"no_timestamps_token_id": 40, "is_multilingual": False, "return_timestamps": False, "max_length": 100}
    for name, value in known.items():
        setattr(model.generation_config, name, value)
    return model


def _made(kind: type[PreTrainedModel], *settings: dict[str, Any], **more: Any) -> Callable[[], PreTrainedModel]:
    return lambda: kind(kind.config_class(**reduce(or_, (IDS, *settings, more))))


FAMILIES = {
    "t5": _made(hf.T5ForConditionalGeneration, T5),
    "umt5": _made(hf.UMT5ForConditionalGeneration, T5),
    "switch_transformers": _made(hf.SwitchTransformersForConditionalGeneration, T5, num_experts=2, expert_capacity=64),
    "t5gemma": _t5gemma,
    "bart": _made(hf.BartForConditionalGeneration, LAYERS, max_position_embeddings=128),
    "marian": _made(hf.MarianMTModel, LAYERS, max_position_embeddings=128),
    "m2m_100": _made(hf.M2M100ForConditionalGeneration, LAYERS, decoder_start_token_id=2),
    "speech_to_text": _made(
        hf.Speech2TextForConditionalGeneration,
        *(LAYERS, SOUND),
        input_feat_per_channel=8,
        conv_channels=16,
        decoder_start_token_id=2,
    ),
    "whisper": _whisper,
    "trocr": _trocr,
}
LIKE_THEM = {  # others of the same make
    "mt5": _made(hf.MT5ForConditionalGeneration, T5),
    "longt5": _made(hf.LongT5ForConditionalGeneration, T5),
    "mbart": _made(hf.MBartForConditionalGeneration, LAYERS),
    "plbart": _made(hf.PLBartForConditionalGeneration, LAYERS),
    "mvp": _made(hf.MvpForConditionalGeneration, LAYERS),
    "pegasus": _made(hf.PegasusForConditionalGeneration, LAYERS),
    "bigbird_pegasus": _made(hf.BigBirdPegasusForConditionalGeneration, LAYERS, attention_type="original_full"),
    "blenderbot": _made(hf.BlenderbotForConditionalGeneration, LAYERS),
    "blenderbot-small": _made(hf.BlenderbotSmallForConditionalGeneration, LAYERS),
    "nllb-moe": _made(
        hf.NllbMoeForConditionalGeneration, LAYERS, num_experts=2, expert_capacity=64, decoder_start_token_id=2
    ),
}


def model(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    made = (FAMILIES | LIKE_THEM)[family]().eval()
    made.generation_config.forced_bos_token_id = made.generation_config.forced_eos_token_id = None
    made.generation_config.num_beams = 1
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                weight.mul_(20 if "relative_attention_bias" in name else 2)
    return made


def inputs(name: str, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Of `rows` different lengths, where that is text."""
    draws = torch.Generator().manual_seed(seed)
    if name in ("whisper", "speech_to_text"):
        shape = (rows, 8, FRAMES) if name == "whisper" else (rows, FRAMES, 8)
        return {"input_features": torch.randn(shape, generator=draws)}
    if name == "trocr":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=draws)}
    ids = torch.randint(3, VOCAB, (rows, 9), generator=draws)
    mask = (torch.arange(9) < torch.arange(9, 9 - 2 * rows, -2)[:, None]).long()  # padding on the right, as T5's
    return {"input_ids": ids * mask, "attention_mask": mask}


def borrowing() -> PreTrainedModel:
    """A decoder alone that reads the states of tiny Whisper's encoder, as distil-whisper's do, and agrees with it."""
    target = model("whisper")
    draft = hf.WhisperForCausalLM(copy.deepcopy(target.config)).eval()
    draft.model.decoder.load_state_dict(target.model.decoder.state_dict())
    draft.proj_out.weight = target.proj_out.weight
    return draft
