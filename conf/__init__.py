"""The Hydra groups. This folder is the package ``lit_rl.conf`` once installed (see pyproject.toml)."""
