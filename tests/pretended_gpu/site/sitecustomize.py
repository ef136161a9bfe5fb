"""Starts the pretended GPU in every Python process that has this folder on its PYTHONPATH: see ../pretend.py."""

import os
import sys
import warnings
from pathlib import Path

if os.environ.get("PRETEND"):
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import pretend

    pretend.start(int(os.environ["PRETEND"]))
    # A mixture of devices in a trial would cost speed alone: see lit_rl/models/policy/trial.py.
    warnings.filterwarnings("error", ".* could not be tried on")
