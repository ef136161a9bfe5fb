"""torchvision for tests alone, from a folder of its own (`make test-families` makes it and names it).

Packages have it for CUDA, and beside PyTorch for the CPU it cannot be imported: its compiled operations are missing.
Processors need none of them, so here they have names and nothing more. Where torchvision can be found, transformers
makes pixels by it, and other digits than without: so it is found where a variable says so, and nowhere else.
"""

from __future__ import annotations

import os
import sys

import torch

FOLDER = os.environ.get("LIT_RL_TEST_TORCHVISION", "")
"""Where it is. Empty: tests run without torchvision."""

_OPERATIONS = ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_BACKWARD = ("_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward")

if FOLDER:
    sys.path.append(os.path.abspath(FOLDER))
    library = torch.library.Library("torchvision", "DEF")  # lives as long as this module
    for name in (*_OPERATIONS, *_BACKWARD, "_deform_conv2d_backward"):
        library.define(f"{name}(Tensor a) -> Tensor")
