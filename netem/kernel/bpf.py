"""bpf(2): maps and programs through the system call itself, by ctypes.

Structures and numbers: `include/uapi/linux/bpf.h`. Every object is a file descriptor and a context manager;
the kernel keeps a program (and the maps it uses) as long as a filter refers to it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes import c_char, c_uint32, c_uint64
from types import TracebackType
from typing import Self

from netem.kernel.errors import KernelError

_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PROG_LOAD = 0, 1, 2, 3, 4, 5
_TEST_RUN, _PROG_BY_ID, _MAP_BY_ID, _INFO_BY_FD, _RAW_TRACEPOINT, _LOOKUP_BATCH = 10, 13, 14, 15, 17, 24
_MAPS_MAX = 64  # of one program (MAX_USED_MAPS)

HASH, ARRAY = 1, 2
NO_PREALLOC, MMAPABLE = 1, 1 << 10
ANY, NOEXIST = 0, 1
SCHED_CLS, RAW_TRACEPOINT = 3, 17

_LOG_BYTES = 1 << 20
_BATCH = 4096


class BpfError(KernelError):
    """A bpf(2) command failed; `log` holds the verifier's words when a program was refused."""

    def __init__(self, attempted: str, code: int, log: str = "") -> None:
        self.log = log
        hint = ""
        if code == errno.EPERM:
            hint = "; needs CAP_BPF and CAP_NET_ADMIN, and before Linux 5.11 a large enough RLIMIT_MEMLOCK"
        last = f"; verifier: {' / '.join(log.strip().splitlines()[-3:])}" if log.strip() else ""
        super().__init__(attempted, code, f"{os.strerror(code)}{hint}{last}")


class _MapCreate(ctypes.Structure):
    _fields_ = (
        ("map_type", c_uint32), ("key_size", c_uint32), ("value_size", c_uint32), ("max_entries", c_uint32),
        ("map_flags", c_uint32), ("inner_map_fd", c_uint32), ("numa_node", c_uint32), ("map_name", c_char *
        16),
    )  # fmt: skip


class _Element(ctypes.Structure):
    _fields_ = (("map_fd", c_uint32), ("key", c_uint64), ("value", c_uint64), ("flags", c_uint64))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("in_batch", c_uint64), ("out_batch", c_uint64), ("keys", c_uint64), ("values", c_uint64),
        ("count", c_uint32), ("map_fd", c_uint32), ("elem_flags", c_uint64), ("flags", c_uint64),
    )  # fmt: skip


class _ProgLoad(ctypes.Structure):
    _fields_ = (
        ("prog_type", c_uint32), ("insn_cnt", c_uint32), ("insns", c_uint64), ("license", c_uint64),
        ("log_level", c_uint32), ("log_size", c_uint32), ("log_buf", c_uint64), ("kern_version", c_uint32),
        ("prog_flags", c_uint32), ("prog_name", c_char * 16),
    )  # fmt: skip


class _TestRun(ctypes.Structure):
    _fields_ = (
        ("prog_fd", c_uint32), ("retval", c_uint32), ("data_size_in", c_uint32), ("data_size_out", c_uint32),
        ("data_in", c_uint64), ("data_out", c_uint64), ("repeat", c_uint32), ("duration", c_uint32),
        ("ctx_size_in", c_uint32), ("ctx_size_out", c_uint32), ("ctx_in", c_uint64), ("ctx_out", c_uint64),
    )  # fmt: skip


class _InfoByFd(ctypes.Structure):
    _fields_ = (("fd", c_uint32), ("info_len", c_uint32), ("info", c_uint64))


class _ProgInfo(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32), ("id", c_uint32), ("tag", c_char * 8), ("jited_prog_len", c_uint32),
        ("xlated_prog_len", c_uint32), ("jited_prog_insns", c_uint64), ("xlated_prog_insns", c_uint64),
        ("load_time", c_uint64), ("uid", c_uint32), ("nr_map_ids", c_uint32), ("map_ids", c_uint64),
    )  # fmt: skip


class _MapInfo(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32), ("id", c_uint32), ("key_size", c_uint32), ("value_size", c_uint32),
        ("max_entries", c_uint32), ("map_flags", c_uint32), ("name", c_char * 16),
    )  # fmt: skip


class _ById(ctypes.Structure):
    _fields_ = (("id", c_uint32), ("next_id", c_uint32), ("open_flags", c_uint32))


class _RawTracepoint(ctypes.Structure):
    _fields_ = (("name", c_uint64), ("prog_fd", c_uint32), ("unused", c_uint32))


@functools.cache  # opening the C library costs more than the call
def _syscall() -> tuple[ctypes.CDLL, int]:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise BpfError(f"bpf(2) on {platform.machine()}: system call number not known", errno.ENOSYS)
    return ctypes.CDLL(None, use_errno=True), number


def _bpf(command: int, attributes: ctypes.Structure) -> int:
    """The call's result, or minus the error number: callers know which errors are answers."""
    libc, number = _syscall()
    result = libc.syscall(number, command, ctypes.byref(attributes), ctypes.sizeof(attributes))
    return result if result >= 0 else -ctypes.get_errno()


def _checked(result: int, attempted: str, log: str = "") -> int:
    if result < 0:
        raise BpfError(attempted, -result, log)
    return result


class _Owned:
    """An object that lives as long as its file descriptor."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class Map(_Owned):
    """A BPF map with keys and values of fixed size, as bytes."""

    def __init__(self, name: str, kind: int, key_bytes: int, value_bytes: int, entries: int, flags: int = 0) -> None:
        what = _MapCreate(kind, key_bytes, value_bytes, entries, flags, map_name=name.encode()[:15])
        self._use(_checked(_bpf(_MAP_CREATE, what), f"create the BPF map {name}"), name, key_bytes, value_bytes)
        self.entries = entries

    @classmethod
    def of_id(cls, number: int) -> Self:
        """A map that exists, by the kernel's number for it."""
        fd = _checked(_bpf(_MAP_BY_ID, _ById(number)), f"open the BPF map {number}")
        found = cls.__new__(cls)
        try:
            info = _MapInfo()
            what = _InfoByFd(fd, ctypes.sizeof(info), ctypes.addressof(info))
            _checked(_bpf(_INFO_BY_FD, what), f"read the BPF map {number}")
        except BaseException:
            os.close(fd)
            raise
        found._use(fd, info.name.decode(), info.key_size, info.value_size)
        found.entries = info.max_entries
        return found

    def _use(self, fd: int, name: str, key_bytes: int, value_bytes: int) -> None:
        super().__init__(fd, name)
        self.key_bytes = key_bytes
        self.value_bytes = value_bytes
        # One pair of buffers for all single calls: keeps a write at a few microseconds.
        self._key = ctypes.create_string_buffer(key_bytes)
        self._value = ctypes.create_string_buffer(value_bytes)
        self._element = _Element(self.fd, ctypes.addressof(self._key), ctypes.addressof(self._value), ANY)

    def update(self, key: bytes, value: bytes, flags: int = ANY) -> None:
        """Set one element. A program that runs meanwhile may see it word by word (8 bytes), old and new."""
        self._set_key(key)
        if len(value) != self.value_bytes:
            raise ValueError(f"BPF map {self.name}: value of {len(value)} bytes, expected {self.value_bytes}")
        self._value.raw = value
        self._element.flags = flags
        _checked(_bpf(_UPDATE, self._element), f"write the BPF map {self.name}")

    def lookup(self, key: bytes) -> bytes | None:
        self._set_key(key)
        self._element.flags = 0
        result = _bpf(_LOOKUP, self._element)
        if result == -errno.ENOENT:
            return None
        _checked(result, f"read the BPF map {self.name}")
        return self._value.raw

    def delete(self, key: bytes) -> None:
        """Remove one element; one that is not there is removed already."""
        self._set_key(key)
        result = _bpf(_DELETE, _Element(self.fd, ctypes.addressof(self._key)))
        if result != -errno.ENOENT:
            _checked(result, f"remove from the BPF map {self.name}")

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """All elements, in batches where the kernel can (Linux 5.6), else one by one."""
        try:
            yield from self._batches()
        except BpfError as error:
            if error.code != errno.EINVAL:
                raise
            yield from self._one_by_one()

    def _batches(self) -> Iterator[tuple[bytes, bytes]]:
        keys = ctypes.create_string_buffer(_BATCH * self.key_bytes)
        values = ctypes.create_string_buffer(_BATCH * self.value_bytes)
        token = ctypes.create_string_buffer(max(8, self.key_bytes))
        position, done = 0, False
        while not done:
            batch = _Batch(
                position, ctypes.addressof(token), ctypes.addressof(keys), ctypes.addressof(values),
                _BATCH, self.fd,
            )  # fmt: skip
            result = _bpf(_LOOKUP_BATCH, batch)
            done = result == -errno.ENOENT  # the end; `count` elements came with it
            if not done:
                _checked(result, f"read the BPF map {self.name}")
            position = ctypes.addressof(token)
            raw_keys, raw_values = keys.raw, values.raw
            for n in range(batch.count):
                yield (
                    raw_keys[n * self.key_bytes : (n + 1) * self.key_bytes],
                    raw_values[n * self.value_bytes : (n + 1) * self.value_bytes],
                )

    def _one_by_one(self) -> Iterator[tuple[bytes, bytes]]:
        following = ctypes.create_string_buffer(self.key_bytes)
        step = _Element(self.fd, 0, ctypes.addressof(following), 0)
        while (result := _bpf(_NEXT_KEY, step)) != -errno.ENOENT:
            _checked(result, f"walk the BPF map {self.name}")
            key = following.raw
            value = self.lookup(key)
            if value is not None:
                yield key, value
            self._key.raw = key
            step.key = ctypes.addressof(self._key)

    def memory(self) -> mmap.mmap:
        """The values of an array made with MMAPABLE, as they are now and will be: read only, eight bytes aligned.

        It outlives the map's descriptor; the caller closes it. Linux 5.5.
        """
        size = self.entries * ((self.value_bytes + 7) // 8 * 8)
        size = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            return mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise BpfError(f"map the BPF map {self.name} into memory", error.errno or 0) from error

    def _set_key(self, key: bytes) -> None:
        if len(key) != self.key_bytes:
            raise ValueError(f"BPF map {self.name}: key of {len(key)} bytes, expected {self.key_bytes}")
        self._key.raw = key


class Program(_Owned):
    """A loaded program: a classifier (SCHED_CLS), or one for a raw tracepoint."""

    def __init__(self, name: str, code: bytes, licence: str = "Dual MIT/GPL", kind: int = SCHED_CLS) -> None:
        text = ctypes.create_string_buffer(code, len(code))
        licence_text = ctypes.create_string_buffer(licence.encode())
        what = _ProgLoad(
            kind, len(code) // 8, ctypes.addressof(text), ctypes.addressof(licence_text),
            prog_name=name.encode()[:15],
        )  # fmt: skip
        result = _bpf(_PROG_LOAD, what)
        log = ""
        if result < 0:  # once more for the verifier's reasons: a log buffer that is too small is an error itself
            buffer = ctypes.create_string_buffer(_LOG_BYTES)
            what.log_level, what.log_size, what.log_buf = 1, _LOG_BYTES, ctypes.addressof(buffer)
            result = _bpf(_PROG_LOAD, what)
            log = buffer.value.decode(errors="replace")
        super().__init__(_checked(result, f"load the BPF program {name}", log), name)

    @property
    def id(self) -> int:
        """The kernel's number for this program, also found in a dump of the filter that runs it."""
        info = _ProgInfo()
        what = _InfoByFd(self.fd, ctypes.sizeof(info), ctypes.addressof(info))
        _checked(_bpf(_INFO_BY_FD, what), f"read the BPF program {self.name}")
        return int(info.id)

    @property
    def translated(self) -> bytes:
        """The instructions as the kernel has rewritten them: with offsets into its own structures."""
        info = _ProgInfo()
        what = _InfoByFd(self.fd, ctypes.sizeof(info), ctypes.addressof(info))
        _checked(_bpf(_INFO_BY_FD, what), f"read the BPF program {self.name}")
        text = ctypes.create_string_buffer(info.xlated_prog_len)
        info = _ProgInfo(xlated_prog_len=len(text), xlated_prog_insns=ctypes.addressof(text))
        what = _InfoByFd(self.fd, ctypes.sizeof(info), ctypes.addressof(info))
        _checked(_bpf(_INFO_BY_FD, what), f"read the instructions of the BPF program {self.name}")
        return text.raw

    def test_run(self, frame: bytes, repeat: int = 1) -> tuple[int, int]:
        """Run on a frame (link-layer header first) without any interface: (result, mean duration in ns)."""
        data = ctypes.create_string_buffer(frame, len(frame))
        what = _TestRun(self.fd, data_size_in=len(frame), data_in=ctypes.addressof(data), repeat=repeat)
        _checked(_bpf(_TEST_RUN, what), f"run the BPF program {self.name}")
        return ctypes.c_int32(what.retval).value, int(what.duration)


def maps_of(program_id: int) -> dict[str, Map]:
    """The maps of a loaded program by name, opened; `close` them. Needs CAP_SYS_ADMIN (bpf(2), *_GET_FD_BY_ID)."""
    with _Owned(_checked(_bpf(_PROG_BY_ID, _ById(program_id)), f"open the BPF program {program_id}"), "") as program:
        numbers = (c_uint32 * _MAPS_MAX)()
        info = _ProgInfo(nr_map_ids=_MAPS_MAX, map_ids=ctypes.addressof(numbers))
        what = _InfoByFd(program.fd, ctypes.sizeof(info), ctypes.addressof(info))
        _checked(_bpf(_INFO_BY_FD, what), f"read the maps of the BPF program {program_id}")
        with ExitStack() as stack:
            found = [stack.enter_context(Map.of_id(number)) for number in numbers[: info.nr_map_ids]]
            stack.pop_all()
    return {each.name: each for each in found}


class RawTracepoint(_Owned):
    """A program at a tracepoint of the whole host, until closed (Linux 4.17, CONFIG_BPF_EVENTS)."""

    def __init__(self, name: str, program: Program) -> None:
        text = ctypes.create_string_buffer(name.encode())
        what = _RawTracepoint(ctypes.addressof(text), program.fd, 0)
        super().__init__(_checked(_bpf(_RAW_TRACEPOINT, what), f"attach {program.name} to tracepoint {name}"), name)
