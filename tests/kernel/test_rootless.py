"""Without root, for real, in a process of its own."""

from __future__ import annotations

import os

import pytest

from netem import rootless
from netem.kernel import netns
from netem.kernel.errors import Unavailable
from netem.kernel.user import User


def test_a_network_namespace_is_made_in_a_user_namespace() -> None:
    before = netns.names()
    try:
        text = rootless.attempt(User.current())
    except Unavailable as error:
        pytest.skip(f"{error}")
    assert text == "a network namespace was made without root"
    assert netns.names() == before, "what a rootless process makes must not be seen outside"
    assert os.geteuid() == 0
    assert not rootless.inside()
