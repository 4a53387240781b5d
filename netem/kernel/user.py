"""The user that workloads run as: the one who called sudo."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from netem.kernel.errors import Unavailable

MAX_ID = 2**32 - 2  # 2**32 - 1 means "no user" (chown(2))


@dataclass(frozen=True)
class User:
    """An identity a process can take on."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def current(cls) -> User:
        """The process's own identity: root, in a lab."""
        uid = os.geteuid()
        name, home = _passwd(uid)
        return cls(name, uid, os.getegid(), tuple(os.getgroups()), home)

    @classmethod
    def caller(cls, environ: Mapping[str, str] | None = None) -> User:
        """Who called sudo (SUDO_UID, SUDO_GID); without sudo, or when root called it, the process's own identity.

        Unavailable when these are no ids: rather than run a workload as root.
        """
        environ = os.environ if environ is None else environ
        if os.geteuid() != 0:
            return cls.current()
        uid, gid = (_id(environ, name) for name in ("SUDO_UID", "SUDO_GID"))
        return cls.of(uid, gid) if uid else cls.current()

    @classmethod
    def of(cls, uid: int, gid: int | None = None) -> User:
        """A user by id; one that the system does not list has no supplementary groups and home /."""
        name, home = _passwd(uid)
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            gid = uid if gid is None else gid
            return cls(name, uid, gid, (gid,), home)
        gid = entry.pw_gid if gid is None else gid
        return cls(name, uid, gid, tuple(os.getgrouplist(entry.pw_name, gid)), home)

    @property
    def is_current(self) -> bool:
        return self.uid == os.geteuid()

    def own(self, descriptor: int) -> None:
        """Give an open file or folder to this user: never by name, which may mean another file by now."""
        if not self.is_current:
            os.fchown(descriptor, self.uid, self.gid)


def _id(environ: Mapping[str, str], name: str) -> int | None:
    """The user or group id in a variable of sudo; None where it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= MAX_ID):
        remedy = f"Call it through sudo, which sets {name}; or unset {name} to run everything as root."
        raise Unavailable(f"user: {name} is {text[:40]!r}, not the id of a user or group", remedy)
    return int(text)


def _passwd(uid: int) -> tuple[str, str]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return str(uid), "/"
    return entry.pw_name, entry.pw_dir
