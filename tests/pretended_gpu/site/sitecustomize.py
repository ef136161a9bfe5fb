"""Starts the pretended GPU in every Python process that has this folder on its PYTHONPATH: see ../pretend.py."""

import os
import sys
import warnings
from pathlib import Path

if os.environ.get("PRETEND"):
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import pretend

    try:
        pretend.start(int(os.environ["PRETEND"]))
    except Exception as error:  # Python would print it and go on, and the CPU would do the work
        sys.exit(f"PRETEND={os.environ['PRETEND']}: {error}")
    # A mixture of devices in a trial would cost speed alone: see lit_rl/models/trial.py.
    warnings.filterwarnings("error", ".* could not be tried on")
