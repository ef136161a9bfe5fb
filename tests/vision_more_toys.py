"""Toys as in `vision_toys`, of families whose processors need torchvision, and SmolVLM's num2words.

`torchvision_beside` makes both importable.
"""

from __future__ import annotations

from typing import Any

import transformers as hf
from vision_toys import EYES, OF_IDEFICS, of_idefics, shown, text_of, tokenizer_of

PATCHES = {"patch_size": 8, "temporal_patch_size": 2}
SEEING = {**PATCHES, "depth": 2, "hidden_size": 64, "num_heads": 2, "spatial_merge_size": 2}
"""A tower of the Qwen family."""


def qwen2_vl() -> tuple[Any, Any]:
    eyes = {**PATCHES, "depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2}
    return _qwen(hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig, hf.Qwen2VLProcessor, eyes)


def qwen2_5_vl() -> tuple[Any, Any]:
    eyes = {**SEEING, "intermediate_size": 96, "window_size": 32, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    return _qwen(hf.Qwen2_5_VLForConditionalGeneration, hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, eyes)


def qwen3_vl() -> tuple[Any, Any]:
    """What its tower sees is added in the text's first layer too (deepstack)."""
    deep = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    eyes = {**SEEING, "intermediate_size": 96, "out_hidden_size": 64, **deep}
    text = {"head_dim": 32, "rope_parameters": {**_turned(), "mrope_interleaved": True}}
    return _qwen(hf.Qwen3VLForConditionalGeneration, hf.Qwen3VLConfig, hf.Qwen3VLProcessor, eyes, **text)


def _turned() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _qwen(model: Any, config: Any, processor: Any, eyes: dict[str, Any], **text: Any) -> tuple[Any, Any]:
    names = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    tokenizer = tokenizer_of(list(names.values()))
    how = {**PATCHES, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    videos = hf.Qwen3VLVideoProcessor if processor is hf.Qwen3VLProcessor else hf.Qwen2VLVideoProcessor
    template = shown(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")))
    made = processor(hf.Qwen2VLImageProcessor(**how), tokenizer, videos(**how), chat_template=template)
    text = {"rope_parameters": _turned(), **text}
    settings = config(
        text_config=text_of(tokenizer, **text),
        vision_config=eyes,
        tie_word_embeddings=True,
        **{field: tokenizer.convert_tokens_to_ids(name) for field, name in names.items()},
    )
    return model(settings), made


def smolvlm() -> tuple[Any, Any]:
    tokenizer = tokenizer_of(OF_IDEFICS)
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}
    images = hf.SmolVLMImageProcessor(**size, do_image_splitting=False)
    videos = hf.SmolVLMVideoProcessor(**size)
    processor = hf.SmolVLMProcessor(
        images, tokenizer, videos, image_seq_len=4, chat_template=shown("<image>", "<video>")
    )
    return hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(**of_idefics(tokenizer))), processor


def llava_onevision() -> tuple[Any, Any]:
    """An image that is alone in its prompt is seen whole and in tiles, one of several whole."""
    tokenizer, sizes = tokenizer_of(["<image>", "<video>"]), [[32, 32], [32, 64], [64, 32]]
    size = {"height": 32, "width": 32}
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=sizes),
        tokenizer,
        hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=shown("<image>", "<video>"),
    )
    image, video = (tokenizer.convert_tokens_to_ids(name) for name in ("<image>", "<video>"))
    config = hf.LlavaOnevisionConfig(
        text_config=text_of(tokenizer, model_type="qwen2"),
        vision_config={**EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=image,
        image_token_id=image,
        video_token_index=video,
        video_token_id=video,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=sizes,
        tie_word_embeddings=True,
    )
    return hf.LlavaOnevisionForConditionalGeneration(config), processor


def internvl() -> tuple[Any, Any]:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_of(list(names.values()), extra_special_tokens=names)
    size = {"height": 32, "width": 32}
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=2),
        tokenizer,
        hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=shown("<IMG_CONTEXT>", "<video>"),
    )
    config = hf.InternVLConfig(
        text_config=text_of(tokenizer, model_type="qwen2"),
        vision_config={**EYES, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    return hf.InternVLForConditionalGeneration(config), processor


MORE_TOYS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "smolvlm": smolvlm,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
}
