"""Alarms: warnings of what goes wrong slowly, while it can still be mended."""

from lit_rl.callbacks.alarms.base import Alarm as Alarm
from lit_rl.callbacks.alarms.kinds import ClippedShare as ClippedShare
from lit_rl.callbacks.alarms.kinds import DeadGroups as DeadGroups
from lit_rl.callbacks.alarms.kinds import EntropyCollapse as EntropyCollapse
from lit_rl.callbacks.alarms.kinds import HeldOutFlat as HeldOutFlat
from lit_rl.callbacks.alarms.kinds import KLBlowUp as KLBlowUp
from lit_rl.callbacks.alarms.kinds import LengthDrift as LengthDrift
from lit_rl.callbacks.alarms.kinds import RepetitionDrift as RepetitionDrift
