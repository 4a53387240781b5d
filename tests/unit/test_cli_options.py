"""Options: what they allow, and what they say about what they do not."""

from __future__ import annotations

import pytest

from netem.cli import main
from netem.commands import execute


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "burst90", "--seed", "x"], "'--seed': 'x' is not a seed: a whole number from 0 to 2^63-1"),
        (["validate", "burst90", "--seed", str(2**63)], "a whole number from 0 to 2^63-1"),
        (["validate", "star3", "--seed", "3"], "star3: --seed: a topology has no seed"),
        (["show", "star3", "--seed", "3"], "star3: --seed: a topology has no seed"),
        (["run", "burst90", "--out", ""], "'--out': it is empty"),
        (["up", "star3", "--name", "a b"], "--name: 'a b' is not a valid name"),
        (["exec", "worker1", "--lab", "x"], "give a command: dblp-netem exec [--lab LAB] HOST -- COMMAND"),
        (["exec", "worker1", "--json", "--", "true"], "--json: options stand before the host"),
    ],
)
def test_options_name_what_they_allow(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_lab_may_stand_behind_the_host() -> None:
    assert execute._late_lab(["--lab", "x", "--", "ls", "--lab", "y"], None) == ("x", ["ls", "--lab", "y"])
    assert execute._late_lab(["--lab=x", "--", "ls"], "z") == ("x", ["ls"])
    assert execute._late_lab(["--", "--lab", "y"], "z") == ("z", ["--lab", "y"])
    assert execute._late_lab(["ls", "--", "x"], None) == (None, ["ls", "--", "x"])
