"""Where a member's time goes, and what the machine did for it; no torch."""

from paceline.telemetry.clock import EVALUATION, StepClock
from paceline.telemetry.recorder import Recorder

__all__ = ["EVALUATION", "Recorder", "StepClock"]
