"""Small vision-language models of transformers, random, with their real processors, as saved folders.

A byte is a token, text is two layers wide 64, and an image has 4 to 16 tokens. Those whose processors need torchvision
are in `vision_more_toys`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' %}VIDEO"
    "{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
EYES = {**SMALL, "image_size": 32, "patch_size": 8}


OF_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
OF_IDEFICS += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]


def tokenizer_of(special: list[str], **how: Any) -> Any:
    """A token for each byte, and these."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<pad>", "<|start|>", "<|end|>", *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    ends = {"eos_token": "<|end|>", "pad_token": "<pad>", "padding_side": "left"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **how)


def text_of(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        **SMALL,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        **more,
    }


def idefics3() -> tuple[Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = tokenizer_of(OF_IDEFICS)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=shown("<image>"))
    return hf.Idefics3ForConditionalGeneration(hf.Idefics3Config(**of_idefics(tokenizer))), processor


def of_idefics(tokenizer: Any) -> dict[str, Any]:
    """What the configs of Idefics3 and SmolVLM have in common."""
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "scale_factor": 2,
        "text_config": text_of(tokenizer, model_type="llama"),
        "vision_config": EYES,
    }


def llava() -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_of(["<image>"])
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = hf.LlavaProcessor(images, tokenizer, **_processing_of_llava())
    config = hf.LlavaConfig(**_of_llava(tokenizer), image_seq_length=16)
    return hf.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer, sizes = tokenizer_of(["<image>"]), [[32, 32], [32, 64], [64, 32]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=sizes
    )
    processor = hf.LlavaNextProcessor(images, tokenizer, **_processing_of_llava())
    config = hf.LlavaNextConfig(**_of_llava(tokenizer), image_grid_pinpoints=sizes)
    return hf.LlavaNextForConditionalGeneration(config), processor


def _processing_of_llava() -> dict[str, Any]:
    """A CLIP tower has one token beside its patches, which is left out."""
    return {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "chat_template": shown("<image>"),
    }


def _of_llava(tokenizer: Any) -> dict[str, Any]:
    number = tokenizer.convert_tokens_to_ids("<image>")
    return {
        "text_config": text_of(tokenizer, model_type="qwen2"),
        "vision_config": {**EYES, "model_type": "clip_vision_model", "projection_dim": 64},
        "image_token_index": number,
        "image_token_id": number,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    }


def gemma3() -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_of([*names.values(), "<bos>"], bos_token="<bos>", extra_special_tokens=names)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=4)
    processor = hf.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=shown("<start_of_image>"))
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3Config(
        text_config=text_of(tokenizer, head_dim=32, sliding_window=256, layer_types=kinds),
        vision_config={**EYES, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=True,
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # zero as it is made
    return model, processor


def paligemma() -> tuple[Any, Any]:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = tokenizer_of(["<image>", "<bos>"], bos_token="<bos>")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, tokenizer, chat_template=shown("<image>"))
    number = processor.tokenizer.convert_tokens_to_ids("<image>")
    text = text_of(processor.tokenizer, model_type="gemma2", head_dim=32, sliding_window=256, query_pre_attn_scalar=32)
    config = hf.PaliGemmaConfig(
        text_config=text,
        vision_config={**EYES, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64},
        image_token_index=number,
        image_token_id=number,
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=True,
    )
    return hf.PaliGemmaForConditionalGeneration(config), processor


def shown(placeholder: str, video: str = "") -> str:
    return TEMPLATE.replace("IMAGE", placeholder).replace("VIDEO", video)


TOYS = {"idefics3": idefics3, "llava": llava, "llava_next": llava_next, "gemma3": gemma3, "paligemma": paligemma}


def made(kind: str) -> tuple[Any, Any]:
    """A toy of this module or of `vision_more_toys`, its weights of one seed."""
    from vision_more_toys import MORE_TOYS

    torch.manual_seed(0)
    return {**TOYS, **MORE_TOYS}[kind]()


def save(kind: str, folder: Path) -> Path:
    """The folder of a toy, its weights of one seed."""
    model, processor = made(kind)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that what differs can be seen
            if parameter.ndim > 1:
                parameter.mul_(1 if kind in ("gemma3", "paligemma") else 3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(number: int, width: int = 32, height: int = 32) -> Image.Image:
    """A picture of random pixels, the same for a number."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
