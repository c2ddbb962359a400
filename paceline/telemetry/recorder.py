"""The record that one member writes while it runs: its steps, a sample per second, its own
description.

Steps are encoded when they end and written by the sampling thread, so the training thread never
waits for a disk.
"""

import math
import os
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from io import BufferedWriter
from types import TracebackType

import msgspec
import psutil

from paceline.errors import RecordError
from paceline.record import (
    MemberRecord,
    RecordedEvent,
    RunFolder,
    Sample,
    Step,
    cannot_write,
    versions,
)
from paceline.telemetry.cores import busy_machine_seconds, children_seconds, waited_seconds
from paceline.telemetry.network import InterfaceTraffic, SocketTraffic, Traffic


class Recorder:
    """The writer of one member's files; a context manager that ends with the member's totals."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        name: str,
        role: str,
        host: str,
        owns_interfaces: bool = False,
        sample_seconds: float = 1.0,
        warmup_steps: int = 0,
        dilation: float = 1.0,
    ) -> None:
        """`dilation`: times are divided by it; shares of the CPU stay what this machine spent.

        A sample is taken between the warm-up and the first measured step, so that what came before
        (the first distribution of weights, rebuilt buckets) is told from what a step sends.
        """
        self._dilation, self._warmup_steps = dilation, warmup_steps
        self.member = MemberRecord(
            name=name, role=role, host=host, pid=os.getpid(), versions=versions()
        )
        self._folder = folder
        self._sample_seconds = sample_seconds
        self._traffic = InterfaceTraffic() if owns_interfaces else SocketTraffic()
        self._process = psutil.Process()
        self._pending: deque[Step] = deque()
        self._encoder = msgspec.json.Encoder()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        """Why the record cannot be written; found by the sampling thread, raised in the other."""

        self._thread = threading.Thread(target=self._run, name="paceline-recorder", daemon=True)

    def __enter__(self) -> "Recorder":
        self._began_seconds, (self._began_cpu, _) = time.monotonic(), self._cpu_seconds()
        self._last_seconds, self._last_cpu = self._began_seconds, self._began_cpu
        self._last_children = 0.0
        self._last_traffic = Traffic(0, 0, 0, 0)
        self._last_wait, self._last_machine = 0.0, busy_machine_seconds()
        age_seconds = time.time() - self._process.create_time()
        self.member.began_seconds = (self._began_seconds - age_seconds) / self._dilation
        self._folder.write_member(self.member)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()
        member, traffic = self.member, self._traffic.read()
        elapsed = time.monotonic() - self._began_seconds
        member.ended_seconds = time.monotonic() / self._dilation
        member.status = "finished" if kind is None else "failed"
        member.cpu_fraction = (self._last_cpu - self._began_cpu) / max(elapsed, 1e-9)
        member.bytes_sent, member.bytes_received = traffic.bytes_sent, traffic.bytes_received
        member.packets_sent, member.packets_received = traffic[2], traffic[3]
        # What cannot be written any more must not hide why the member failed.
        with nullcontext() if error is None else suppress(RecordError):
            self._folder.write_member(member)

    def add_step(self, entry: Step) -> None:
        """Take a finished step; written within a second."""
        if self._failure is not None:
            raise cannot_write(self._folder.path, self._failure)
        entry.not_finite = entry.loss is not None and not math.isfinite(entry.loss)
        self._pending.append(entry)
        if entry.step + 1 == self._warmup_steps:
            self._wake.set()

    def note(self, text: str, kind: str = "note", step: int | None = None) -> None:
        """A line for the record: a fallback taken, something emulated, a member lost."""
        now, name = time.monotonic() / self._dilation, self.member.name
        event = RecordedEvent(time_seconds=now, member=name, kind=kind, text=text, step=step)
        self._folder.add_event(event)

    def lost(
        self, name: str, step: int, survivors: str, samples: int | None = None, what: str = ""
    ) -> None:
        """Another member is gone for good, and this one speaks for those who go on; `samples`:
        those of its parts that nobody has trained on. `what` comes of it, where that is more."""
        for member in self._folder.members():
            if member.name == name:
                member.status = "lost"
                self._folder.write_member(member)
        part = "its part of that step is left out"
        if samples is not None:
            part = f"{samples} of its samples were not seen"
        what = what or f"{part}, and {survivors} the batch from then on"
        event = RecordedEvent(
            time_seconds=time.monotonic() / self._dilation,
            member=name,
            kind="lost",
            text=f"{name} was lost in step {step}; {what}",
            step=step,
            samples=samples,
        )
        self._folder.add_event(event)

    def _run(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._failure = error

    def _write(self) -> None:
        members = self._folder.path / "members"
        steps_path = members / f"{self.member.name}.steps.jsonl"
        series_path = members / f"{self.member.name}.series.jsonl"
        with steps_path.open("ab") as steps, series_path.open("ab") as series:
            stopping = False
            while not stopping:
                self._wake.wait(self._sample_seconds)
                self._wake.clear()
                stopping = self._stop.is_set()
                series.write(self._encoder.encode(self._sample()) + b"\n")
                series.flush()
                self._write_steps(steps)

    def _write_steps(self, file: BufferedWriter) -> None:
        while self._pending:
            file.write(self._encoder.encode(self._pending.popleft()) + b"\n")
        file.flush()

    def _sample(self) -> Sample:
        now, traffic = time.monotonic(), self._traffic.read()
        own, children = self._cpu_seconds()
        children = max(children, self._last_children)  # one may end meanwhile
        cpu = own + children
        wait, machine = waited_seconds(), busy_machine_seconds()
        rss_bytes = self._process.memory_info().rss
        self.member.max_rss_bytes = max(rss_bytes, self.member.max_rss_bytes or 0)
        elapsed = max(now - self._last_seconds, 1e-9)
        sample = Sample(
            time_seconds=now / self._dilation,
            cpu_fraction=(cpu - self._last_cpu) / elapsed,
            children_cpu_fraction=(children - self._last_children) / elapsed if children else None,
            cpu_wait_fraction=None if wait is None else (wait - self._last_wait) / elapsed,
            machine_cpu_fraction=(machine - self._last_machine) / elapsed,
            rss_bytes=rss_bytes,
            available_bytes=psutil.virtual_memory().available,
            bytes_sent=traffic.bytes_sent - self._last_traffic.bytes_sent,
            bytes_received=traffic.bytes_received - self._last_traffic.bytes_received,
            packets_sent=traffic.packets_sent - self._last_traffic.packets_sent,
            packets_received=traffic.packets_received - self._last_traffic.packets_received,
        )
        self._last_seconds, self._last_cpu, self._last_traffic = now, cpu, traffic
        self._last_wait, self._last_machine = wait or 0.0, machine
        self._last_children = children
        return sample

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds of this process alone, and of all that it started, running or
        ended."""
        times = self._process.cpu_times()
        ended = times.children_user + times.children_system
        own = float(times.user + times.system)
        return own, float(ended) + children_seconds(self._process.pid)
