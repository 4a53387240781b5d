"""A throw-away kernel that has sch_netem, over the user's own files: for hosts without netem, or without root.

Three engines boot one: QEMU with KVM or, without it, by emulation (virtme.py), and user-mode Linux, a kernel that is an
ordinary program (user_mode.py). The root file system is this machine's, and changes to it are thrown away; only
folders that are handed in keep what is written to them.
"""

from netem.vm.choose import candidates
from netem.vm.machine import Engine, Machine, MachineFailed, NotBooted, run

__all__ = ["Engine", "Machine", "MachineFailed", "NotBooted", "candidates", "run"]
