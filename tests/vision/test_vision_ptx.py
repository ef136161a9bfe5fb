"""Texts of algo.ptx that show images: learned as SFT learns the same rows, beside a policy that sees."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from vision_kinds import kinds
from vision_runs import by_letters, quiet_trainer
from vision_seen import Toy
from vision_toys import picture

from lit_rl.algorithms import GRPO, SFT, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.terms.supervised import SupervisedTerm
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import Sampling
from lit_rl.core.visuals import as_png
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.supervised_text import SupervisedText
from lit_rl.models import LanguageModel
from lit_rl.models.language_model import DEFAULT
from lit_rl.ops.imitation import chord, cross_entropy
from lit_rl.runs.plan import prepare_plan
from lit_rl.runs.run_dir import RunDir
from lit_rl.runs.train import Run

LIMIT = 10**6
HERE = torch.device("cpu")
IMAGE = {"type": "image"}


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A message: an image, what is asked, and the other images."""
    shown = [*parts[:1], {"type": "text", "text": "Which?"}, *parts[1:]]
    return [{"role": "user", "content": shown if parts else "Which?"}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def stored(folder: Path, rows: list[dict[str, Any]], images: int = 6) -> str:
    """The rows in a file, with images beside it: `0.png` and so on, of several sizes."""
    for number in range(images):
        picture(number, 32, 24 + 8 * (number % 3)).save(folder / f"{number}.png")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


URI = "data:image/png;base64," + base64.b64encode(as_png(picture(7))).decode()
FORMS: dict[str, tuple[list[dict[str, Any]], str, str | None]] = {
    "columns": (
        [
            {"prompt": asked(), "completion": "seven", "image": "0.png"},
            {"prompt": asked(), "completion": "a word"},
            {"prompt": asked(IMAGE, IMAGE), "completion": said("both of them"), "images": ["1.png", "2.png"]},
            {"prompt": asked(), "completion": said("one, and no more"), "images": []},
            {"prompt": asked(), "completion": "x", "image": URI},
        ],
        "completion",
        "prompt",
    ),
    "plain prompts": (
        [
            {"prompt": "Which?", "completion": "seven", "image": "0.png"},
            {"prompt": "And?", "completion": "a plain prompt among these is the user's message"},
            {"prompt": "Which?", "completion": "none", "images": ["3.png", "4.png"]},
        ],
        "completion",
        "prompt",
    ),
    "conversations": (
        [
            {"messages": [*asked({**IMAGE, "image": "0.png"}), *said("7"), *asked(), *said("seven, once more")]},
            {"messages": [*asked(IMAGE), *said("eight")], "images": ["5.png"]},
            {"messages": [*asked(), *said("nothing to see")]},
        ],
        "messages",
        None,
    ),
}


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    found = {name: each.grad.clone() for name, each in policy.named_parameters() if each.grad is not None}
    policy.zero_grad()
    return found


def of_sft(toy: Toy, path: str, imitation: Any, **data: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient of SFT's step of all rows of a file."""
    module = SFT(toy.model, imitation=imitation)
    module.policy = toy.policy
    rows = SupervisedDataModule(path=path, batch_size=1, val_fraction=0, **{"max_length": None, **data})
    rows.prepare(toy.model.tokenizer, processor=toy.model.processor, eos_ids=toy.model.eos_ids)
    train = rows.corpus.train
    every = range(len(train))
    loss, _ = module.loss(train.batch(every, every, train.totals(every), step=0, slot=0))
    loss.backward()
    return loss.detach(), gradients(toy.policy)


def of_ptx(
    toy: Toy, texts: SupervisedText, loss: Any, parts: int, weight: float = 0.5
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient of a step of `algo.ptx` in parts, without the weight."""
    term = SupervisedTerm(texts, weight, loss, None, 0.0)
    term.start(encoder_of(toy), LIMIT)
    total = torch.zeros(())
    for part in range(parts):
        how = {"part": part, "parts": parts, "device": HERE, "options": DEFAULT, "sharded": False}
        share, _ = term.share(toy.policy, step=0, seed=3, **how)
        if share.requires_grad:
            (share / parts).backward()
        total += share.detach() / parts
    return total / weight, {name: each / weight for name, each in gradients(toy.policy).items()}


def encoder_of(toy: Toy) -> Encoder:
    return Encoder(toy.model.tokenizer, processor=toy.model.processor, eos_ids=toy.model.eos_ids)


def assert_same(mine: Any, other: Any) -> None:
    torch.testing.assert_close(mine[0], other[0], rtol=1e-5, atol=1e-6)
    size = max(each.abs().max() for each in other[1].values())
    for name in mine[1].keys() | other[1].keys():
        nothing = torch.zeros(())
        found, wanted = mine[1].get(name, nothing), other[1].get(name, nothing)
        assert (found - wanted).abs().max() <= 2e-5 * size, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", kinds("idefics3", "gemma3", "llava_next", "qwen3_vl"))
def test_the_loss_and_its_gradient_are_those_of_sft_of_the_same_rows(
    toy_of: Any, kind: str, form: str, tmp_path: Path
) -> None:
    """Text rows among them, however the step is cut; for CHORD's loss too."""
    toy = toy_of(kind)
    rows, text_key, prompt_key = FORMS[form]
    path = stored(tmp_path, rows)
    texts = SupervisedText(path, len(rows), max_tokens=4096, text_key=text_key, prompt_key=prompt_key)
    for loss, parts in ((cross_entropy, 1), (cross_entropy, 2), (cross_entropy, 9), (chord, 2)):
        wanted = of_sft(toy, path, loss)
        assert_same(of_ptx(toy, texts, loss, parts), wanted)
        assert any(re.search("vision|visual|projector|connector", name) for name in wanted[1]), "it sees"


def test_a_cut_ends_the_reply_as_in_sft_and_never_goes_through_images(toy_of: Any, tmp_path: Path) -> None:
    toy = toy_of(kinds("idefics3", "qwen3_vl")[0])
    rows = [{"prompt": asked(), "completion": said("a reply of many words"), "image": f"{i}.png"} for i in range(3)]
    path, keys = stored(tmp_path, rows), {"text_key": "completion", "prompt_key": "prompt"}
    most = SupervisedText(path, 3, max_tokens=4096, **keys).check(encoder_of(toy))
    assert most is not None
    prompt = most.texts[0].prompt_tokens
    cut = SupervisedText(path, 3, max_tokens=prompt + 4, **keys)
    wanted = of_sft(toy, path, cross_entropy, max_length=prompt + 4)
    assert_same(of_ptx(toy, cut, cross_entropy, 2), wanted)
    assert not torch.equal(wanted[0], of_sft(toy, path, cross_entropy)[0])
    with pytest.raises(DataError, match=rf"rows\.jsonl:\d: .*algo\.ptx\.max_tokens={prompt - 1}"):
        SupervisedText(path, 3, max_tokens=prompt - 1, **keys).check(encoder_of(toy))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no prompt": ({"text": "seven", "image": "0.png"}, {}, r"column 'image'.*algo\.ptx\.prompt_key"),
    "an answer": ({"p": asked(), "text": [{"role": "assistant", "content": [IMAGE]}]}, {"prompt_key": "p"}, "answered"),
    "no file": ({"p": asked(), "text": "7", "image": "9.png"}, {"prompt_key": "p"}, r"9\.png cannot be read"),
    "too large": ({"p": asked(), "text": "7", "image": "0.png"}, {"prompt_key": "p"}, r"max_image_pixels=100\b"),
    "too many": ({"p": asked(IMAGE), "text": "7", "images": ["0.png", "1.png"]}, {"prompt_key": "p"}, "as many"),
    "written": ({"p": "What is {}?", "text": "7"}, {"prompt_key": "p"}, "stands for an image"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rows_that_cannot_be_shown_are_refused_by_name(toy_of: Any, what: str, tmp_path: Path) -> None:
    toy = toy_of(kinds("idefics3", "qwen3_vl")[0])
    row, keys, words = REFUSED[what]
    if isinstance(row.get("p"), str):
        row = {**row, "p": row["p"].format(toy.model.processor.reserved[0])}  # type: ignore[union-attr]
    texts = SupervisedText(stored(tmp_path, [row]), **keys)
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*{words}"):
        texts.check(encoder_of(toy), 100 if what == "too large" else LIMIT)


def test_a_model_that_takes_no_prompt_without_images_learns_no_such_text(toy_of: Any, tmp_path: Path) -> None:
    for kind in kinds("paligemma"):
        with pytest.raises(DataError, match=r"rows\.jsonl:1"):
            SupervisedText(stored(tmp_path, [{"text": "seven"}])).check(encoder_of(toy_of(kind)))


def test_an_image_that_changes_during_the_run_is_an_error(toy_of: Any, tmp_path: Path) -> None:
    toy = toy_of(kinds("idefics3", "qwen3_vl")[0])
    path = stored(tmp_path, [{"p": asked(), "text": "7", "image": "0.png"}])
    term = SupervisedTerm(SupervisedText(path, 1, 4096, prompt_key="p"), 1.0, cross_entropy, None, 0.0)
    term.start(encoder_of(toy), LIMIT)
    picture(8).save(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*changed"):
        term.share(toy.policy, step=0, seed=0, part=0, parts=1, device=HERE, options=DEFAULT, sharded=False)


# ---------------------------------------------------------------------- runs


def mixed(folder: Path, count: int = 6) -> SupervisedText:
    """Texts of which every third shows nothing."""
    rows = [{"prompt": asked(), "text": str(i), **({"image": f"{i}.png"} if i % 3 else {})} for i in range(count)]
    return SupervisedText(stored(folder, rows), 5, prompt_key="prompt")


def beside(texts: SupervisedText, reward: Any = lambda completions, **_: [0.0] * len(completions), **more: Any) -> GRPO:
    optimizer = ByPath("torch.optim.SGD", lr=0.1)
    how = {"group_size": 2, "sampling": Sampling(max_new_tokens=3), "optimizer": optimizer, "scheduler": Constant()}
    return GRPO(LanguageModel("digits", freeze=()), reward, ptx=texts, ptx_coef=0.5, **{**how, **more})


def prompts(seeing: bool = True, **more: Any) -> RolloutDataModule:
    rows = [{"prompt": asked(), **({"image": picture(20 + i)} if seeing else {})} for i in range(8)]
    return RolloutDataModule(**{"rows": rows, "prompts_per_rollout": 4, "val_fraction": 0.0} | more)


def learned(module: GRPO, folder: Path, steps: int, data: Any = None, **more: Any) -> dict[str, torch.Tensor]:
    quiet_trainer(folder, steps, **more).fit(module, datamodule=data or prompts())
    return {name: value.clone() for name, value in module.policy.state_dict().items()}


def test_a_step_is_the_same_however_it_is_cut_and_teaches_what_is_shown(tmp_path: Path) -> None:
    """Rewards are equal, so that the texts alone are learned."""
    start = LanguageModel("digits").load().state_dict()
    whole = learned(beside(mixed(tmp_path)), tmp_path / "one", 2)
    cut = learned(beside(mixed(tmp_path)), tmp_path / "four", 2, accumulate_grad_batches=4)
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-5, atol=1e-6, msg=name)
    moved = {name for name, value in whole.items() if not torch.equal(value, start[name])}
    assert any("connector" in name for name in moved) and any("vision" in name for name in moved)


def test_a_resumed_run_is_shown_what_the_uninterrupted_one_is_to_the_bit(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:  # of a rollout of two steps
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    how = {"reward": by_letters, "minibatches": 2}
    whole = learned(beside(mixed(tmp_path), **how), tmp_path / "whole", 6, callbacks=[Saves()])
    resumed = beside(mixed(tmp_path), **how)
    quiet_trainer(tmp_path / "rest", 6).fit(resumed, datamodule=prompts(), ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.policy.state_dict().items())


def test_a_run_reads_the_texts_by_the_limit_of_its_data_before_a_weight_is_loaded(tmp_path: Path) -> None:
    module = beside(mixed(tmp_path))
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*data\.max_image_pixels=512"):
        learned(module, tmp_path, 1, prompts(seeing=False, max_image_pixels=512))
    assert module.policy is None
    blind = GRPO("tiny", by_letters, group_size=2, ptx=mixed(tmp_path), ptx_coef=0.5)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .*model="):
        learned(blind, tmp_path, 1, prompts(seeing=False))
    assert blind.policy is None


@pytest.mark.parametrize("seeing", [True, False])
def test_the_plan_counts_what_the_texts_show(seeing: bool, tmp_path: Path) -> None:
    def learning(texts: SupervisedText | None) -> Any:
        module = GRPO(
            LanguageModel("digits", freeze=()),
            by_letters,
            group_size=4,
            sampling=Sampling(max_new_tokens=2),
            ptx=texts,
            ptx_coef=0.0 if texts is None else 0.5,
        )
        trainer = quiet_trainer(tmp_path, 1)
        _, sizes, _ = prepare_plan(Run(module, prompts(seeing), trainer, RunDir(tmp_path), None, "", ""))
        assert sizes is not None
        return sizes.learning

    rows = [{"prompt": asked(*[IMAGE] * i), "text": str(i), "images": [f"{n}.png" for n in range(i)]} for i in range(4)]
    texts = SupervisedText(stored(tmp_path, rows), 3, prompt_key="prompt")
    alone, with_texts = learning(None), learning(texts)
    pixels = 3 * 32 * 32 * (3 * 4 + 8)  # of the text that shows most: three images, and which of them are there
    assert with_texts["pixels"] - alone.get("pixels", 0) == 3 * pixels
    assert with_texts["activations of images"] - alone.get("activations of images", 0) > 3 * pixels
