"""A vLLM that is installed and is never imported: a package and its version, and nothing in it."""

from __future__ import annotations

from pathlib import Path


def write_vllm(folder: Path, version: str) -> str:
    """Returns the folder, for `sys.path`."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    return str(folder)
