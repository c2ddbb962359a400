"""Memory of a GPU that all members of a job share: CUDA's own way between processes (IPC).

Where seats and workers are on one GPU, gradients are handed over and weights read inside it. One
process offers memory, others reach it by its ticket. It stays until the process that offered it
ends: nobody can tell when the last one has let go of it.

Whether it works between these members is found out by a trial before the plan is made: a container
or a driver may keep them apart.
"""

import ctypes
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from paceline import spec
from paceline.errors import ExchangeError
from paceline.launch import Identity
from paceline.protocol.placement import seats
from paceline.protocol.plan import Shape, placement_of, shares_memory

T = TypeVar("T")
HANDLE_BYTES = 64
PEER_ACCESS = 1
"""The one flag that CUDA has for opening."""

TRIAL = bytes(range(1, 17))


class DeviceTicket(msgspec.Struct, frozen=True, array_like=True):
    """How another process reaches memory of a GPU."""

    gpu: str
    handle: bytes
    size_bytes: int


class Notes(Protocol):
    """What members leave each other; `Meeting` is one."""

    def leave(self, key: str, note: Any) -> None: ...

    def read(self, key: str, kind: type[T], author: str) -> T: ...


def offer(size_bytes: int, device: torch.device) -> tuple[Tensor, DeviceTicket]:
    """New memory, as bytes, and the ticket to it. What is in it is not known."""
    driver, pointer, handle = _driver(device), ctypes.c_uint64(), _Handle()
    _check(driver.cuMemAlloc_v2(ctypes.byref(pointer), max(size_bytes, 1)), "taking memory")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer), "offering memory")
    ticket = DeviceTicket(gpu_of(device), bytes(handle.values), size_bytes)
    return _tensor(pointer.value or 0, size_bytes, device), ticket


def reach(ticket: DeviceTicket, device: torch.device) -> Tensor:
    """Another process's memory on the GPU that is `device` here, as bytes."""
    if gpu_of(device) != ticket.gpu:
        raise ExchangeError(f"what is offered is on another GPU than {device} here")
    if len(ticket.handle) != HANDLE_BYTES:
        raise ExchangeError("its ticket is not one of CUDA's")
    driver, pointer = _driver(device), ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(ticket.handle)
    code = driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, PEER_ACCESS)
    _check(code, "opening memory of another process")
    return _tensor(pointer.value or 0, ticket.size_bytes, device)


def gpu_of(device: torch.device) -> str:
    """Which GPU of the machine it is, whatever its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def may_be_shared(options: spec.Server, shape: Shape) -> bool:
    """Whether it is worth a trial. Not where workers read weights at their own pace, or go on
    without a lost one, whose memory goes with it."""
    wanted = options.device == "cuda" and options.mode == "sync" and not shape.goes_on
    return wanted and shares_memory(options, shape)


def is_shared(
    options: spec.Server,
    shape: Shape,
    identity: Identity,
    notes: Notes,
    device: torch.device | None,
) -> tuple[bool, str]:
    """Whether all members reach memory that worker 0 offers, and why not if they do not.

    Called by every one of them before the plan, with the GPU that it works on, if any.
    """
    if not may_be_shared(options, shape):
        return False, ""
    if identity.name != "worker0":
        offered = notes.read("device/trial", DeviceTicket, "worker0")
        notes.leave(f"device/reached/{identity.name}", _why_not(offered, device))
    else:
        trial, ticket = _offered(device)
        notes.leave("device/trial", ticket)
        table = seats(placement_of(options, shape), shape.workers, shape.servers)
        names = {f"worker{n}" for n in range(shape.workers)} | {seat.member for seat in table}
        others = sorted(names - {identity.name})
        found = [(name, notes.read(f"device/reached/{name}", str, name)) for name in others]
        told = [f"{name}: {why}" for name, why in found if why]
        if not ticket.handle:
            told = [ticket.gpu]
        notes.leave("device/settled", "; ".join(told))
        del trial  # it had to be there until all had tried
    why = notes.read("device/settled", str, "worker0")
    return not why, why


def _offered(device: torch.device | None) -> tuple[Tensor | None, DeviceTicket]:
    """Worker 0's trial; if there is none, a ticket with the reason in place of a GPU."""
    if device is None:
        return None, DeviceTicket("worker0 computes in main memory", b"", 0)
    try:
        memory, ticket = offer(len(TRIAL), device)
    except ExchangeError as error:
        return None, DeviceTicket(f"worker0: {error}", b"", 0)
    memory.copy_(torch.tensor(list(TRIAL), dtype=torch.uint8))
    settle(device)
    return memory, ticket


def _why_not(ticket: DeviceTicket, device: torch.device | None) -> str:
    if not ticket.handle:
        return ticket.gpu
    if device is None:
        return "it works in main memory"
    try:
        found = reach(ticket, device)
    except ExchangeError as error:
        return str(error)
    return "" if bytes(found.cpu().tolist()) == TRIAL else "it finds other values there"


def settle(device: torch.device) -> None:
    """All that this thread has asked the device for is done: others may look."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Handle(ctypes.Structure):
    _fields_ = (("values", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """What torch makes a tensor of without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor(address: int, size_bytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(address, size_bytes), device=device)


def _driver(device: torch.device) -> Any:
    """CUDA's driver, with this device's context in use by this thread."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ExchangeError(f"CUDA's driver cannot be loaded: {error}") from error
    pointer = ctypes.POINTER(ctypes.c_uint64)
    driver.cuMemAlloc_v2.argtypes = [pointer, ctypes.c_size_t]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise ExchangeError(f"{what} failed with CUDA error {code}")
