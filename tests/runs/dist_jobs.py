"""What runs over several processes: `python dist_jobs.py FOLDER NAME ...` starts them once for all names.

`NAME` is `main` of `test_dist_NAME.py`, `NAME.other` another function of it; each leaves what it did in a folder
of that name. `ddp/NAME` and `fsdp/NAME` are rows of the table `dist_cases.py`, and leave it in the folder `cases`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torchvision_beside  # noqa: F401, I001  # before transformers, which looks for torchvision once
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    base, *names = sys.argv[1:]
    for name in names:
        if "/" in name:
            importlib.import_module("dist_cases").two(name, Path(base) / "cases")
            continue
        (Path(base) / name).mkdir(exist_ok=True)
        module, _, function = name.partition(".")
        getattr(importlib.import_module(f"test_dist_{module}"), function or "main")(Path(base) / name)
