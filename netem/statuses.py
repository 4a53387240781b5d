"""Exit statuses of all commands but `exec`, which returns that of the program it ran."""

OK = 0
FAILED = 1
USAGE = 2
"""Wrong usage, or an invalid file."""
EXPECTATION = 3
"""An expectation of the scenario failed."""
PREFLIGHT = 4
"""A permission, a kernel feature or a program is missing."""
UNFAITHFUL = 5
"""The emulation was not what the scenario asks for."""
INTERRUPTED = 130
