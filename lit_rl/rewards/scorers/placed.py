"""The device of a model that scores."""

from __future__ import annotations

import torch

from lit_rl.errors import ConfigError


class Placed:
    """A model that scores on the device of the run, unless `device` names another."""

    device: str | None = None
    run_device: torch.device | None = None
    """The device of the run, which the training module sets. None outside of a run."""

    @property
    def place(self) -> torch.device:
        """The device to load the model on; without a name and outside of a run the process's GPU, else the CPU.

        Raises:
            ConfigError: `device` is the name of none.
        """
        if self.device is not None:
            try:
                return torch.device(self.device)
            except RuntimeError as error:
                raise ConfigError(f"device={self.device!r} is no device: allowed is cpu, cuda, cuda:1, ...") from error
        if self.run_device is not None:
            return self.run_device
        gpu = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if gpu is None else torch.device(gpu.type, torch.accelerator.current_device_index())
