"""The lists of short runs over two processes: `python dist_jobs.py FOLDER NAME ...` starts the two once for all.

What a list leaves is in a folder of its name.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torchvision_beside  # noqa: F401, I001  # before transformers, which looks for torchvision once
import dist_alarms
import dist_broken
import dist_episodes
import dist_masters
import dist_mesh
import dist_mixed
import dist_offline
import dist_offloaded
import dist_precomputed
import dist_resumed
import dist_samples
import dist_scorers
import dist_shipping
import dist_terms
import dist_vision
import dist_worlds
import dist_written
import torch

LISTS = {
    "alarms": dist_alarms.main,
    "broken": dist_broken.main,
    "episodes": dist_episodes.main,
    "masters": dist_masters.main,
    "mesh": dist_mesh.main,
    "mesh_of_four": dist_mesh.four,
    "mesh_of_four_all": dist_mesh.four_all,
    "mixed": dist_mixed.main,
    "offline": dist_offline.main,
    "offloaded": dist_offloaded.main,
    "precomputed": dist_precomputed.main,
    "resumed": dist_resumed.main,
    "samples": dist_samples.main,
    "scorers": dist_scorers.main,
    "shipping": dist_shipping.main,
    "terms": dist_terms.main,
    "vision": dist_vision.main,
    "worlds": dist_worlds.main,
    "worlds_of_four": dist_worlds.four,
    "written": dist_written.main,
}
"""By the name of the test file: `test_dist_NAME.py` reads what the list leaves, or a test that starts four."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    base, *names = sys.argv[1:]
    for name in names:
        (Path(base) / name).mkdir(exist_ok=True)
        LISTS[name](Path(base) / name)
