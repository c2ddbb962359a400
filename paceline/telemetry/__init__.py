"""Watching a member from inside: where its time goes, what it uses, what it sends."""

from paceline.telemetry.clock import StepClock
from paceline.telemetry.recorder import Recorder

__all__ = ["Recorder", "StepClock"]
