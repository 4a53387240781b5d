"""Which engine boots: KVM where it works, else user-mode Linux, else emulation."""

from __future__ import annotations

import os
from pathlib import Path

from netem.kernel.errors import Unavailable
from netem.vm import user_mode, virtme
from netem.vm.machine import Engine
from netem.vm.user_mode import UserModeLinux
from netem.vm.virtme import Tools, Virtme

KERNEL_VARIABLE = "DBLP_NETEM_VM_KERNEL"


def candidates(kernel: Path | None = None, *, emulate: bool = False) -> list[Engine]:
    """Engines in the order in which to try them: the next one where one did not boot.

    kernel: the only one to take; default: $DBLP_NETEM_VM_KERNEL, or what is installed. emulate: QEMU without KVM.

    Raises Unavailable (exit status 4), which names everything that is missing, and what to install.
    """
    if kernel is None and os.environ.get(KERNEL_VARIABLE):
        kernel = Path(os.environ[KERNEL_VARIABLE])
    if kernel is not None and not os.access(kernel, os.R_OK):
        raise Unavailable(
            f"kernel {kernel}: not a file that can be read", "Name a kernel image such as /boot/vmlinuz-6.1."
        )
    if kernel is not None and user_mode.is_program(kernel):
        return [_user_mode_only(kernel, emulate)]
    tools = Tools.find(kernel)
    native = None if kernel is not None or emulate else user_mode.find()
    return order(tools, native, kvm=not emulate and not tools.missing() and virtme.kvm_offered())


def order(tools: Tools, native: UserModeLinux | None, *, kvm: bool) -> list[Engine]:
    """Pure: of what was found. `kvm`: whether it is worth a try."""
    complete = not tools.missing()
    engines: list[Engine] = [Virtme(tools, kvm=True)] if complete and kvm else []
    engines += [native] if native is not None else []
    engines += [Virtme(tools, kvm=False)] if complete else []
    if not engines:
        raise Unavailable(
            f"a virtual machine needs {user_mode.PACKAGE}; or, which is faster where there is KVM, "
            + "; ".join(tools.missing()),
            "Install what is named, then try again.",
        )
    return engines


def _user_mode_only(kernel: Path, emulate: bool) -> UserModeLinux:
    if emulate:
        raise Unavailable(
            f"kernel {kernel} is a program (user-mode Linux), which QEMU cannot boot", "Leave out --emulate."
        )
    found = user_mode.find(kernel)
    if found is None:
        raise Unavailable(
            f"kernel {kernel} is a program, but no user-mode Linux whose modules have sch_netem",
            f"They are looked for in {' and '.join(str(folder) for folder in user_mode.MODULE_FOLDERS)}.",
        )
    return found
