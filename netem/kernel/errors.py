"""Errors of the lab and its kernel objects; each message names what was attempted."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager


class LabError(Exception):
    """The lab could not do what was asked."""

    exit_status = 1


class KernelError(LabError):
    """A kernel request failed. `code` is the errno, None where the failure was a read-back that differs."""

    def __init__(self, attempted: str, code: int | None = None, detail: str = "") -> None:
        self.attempted = attempted
        self.code = code
        reason = detail or (f"{errno.errorcode.get(code, code)}" if code else "failed")
        super().__init__(f"{attempted}: {reason}")


class Unavailable(LabError):
    """A permission, program or kernel feature is missing (exit status 4); `remedy` says what to do."""

    exit_status = 4

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}. {remedy}")


@contextmanager
def attempting(what: str) -> Generator[None, None, None]:
    """Translate pyroute2's and the system's errors into KernelError(what)."""
    try:
        yield
    except LabError:
        raise
    except OSError as error:
        raise KernelError(what, error.errno, str(error)) from error
    except Exception as error:
        # NetlinkError carries `code`; pyroute2's own errors share no base class with it.
        module = type(error).__module__
        if module.startswith("pyroute2"):
            raise KernelError(what, getattr(error, "code", None), str(error)) from error
        raise
