"""Time, CPU, memory, bytes and packets of a member; no torch."""

from paceline.telemetry.clock import EVALUATION, StepClock
from paceline.telemetry.recorder import Recorder

__all__ = ["EVALUATION", "Recorder", "StepClock"]
