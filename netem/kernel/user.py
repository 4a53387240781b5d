"""The user that workloads run as: the one who called sudo."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass


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
        """Who called sudo (SUDO_UID, SUDO_GID); without sudo, or when root called it, the process's own identity."""
        environ = os.environ if environ is None else environ
        uid = environ.get("SUDO_UID", "")
        if os.geteuid() != 0 or not uid.isdigit() or int(uid) == 0:
            return cls.current()
        return cls.of(int(uid), int(environ["SUDO_GID"]) if environ.get("SUDO_GID", "").isdigit() else None)

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


def _passwd(uid: int) -> tuple[str, str]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return str(uid), "/"
    return entry.pw_name, entry.pw_dir
