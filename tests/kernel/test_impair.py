"""`impair` and `status` on a lab that is up: what is asked for, what the packets see, what is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netem.cli import main
from netem.state import LabState, read

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
SEND = """\
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    sock.sendto(bytes(500), (sys.argv[1], 9))
"""

pytestmark = pytest.mark.usefixtures("unchanged_host")


class Cli:
    """A lab of three workers, and commands on it."""

    def __init__(self, state_dir: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.state_dir, self.capture = state_dir, capture
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SUDO_")},
            "DBLP_NETEM_STATE_DIR": str(state_dir),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80",
        }

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "netem.cli", *arguments]

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """In this process: an interpreter that starts anew takes longer than the command."""
        self.capture.readouterr()
        returned = main(list(arguments))
        said = self.capture.readouterr()
        assert returned == status, said.out + said.err
        return said.out + said.err

    def up(self, *arguments: str) -> None:
        self.address = {h["name"]: h["address"] for h in json.loads(self("up", "star3", "--json", *arguments))["hosts"]}

    def send(self, sender: str, to: str, packets: int) -> None:
        self("exec", sender, "--", sys.executable, "-c", SEND, self.address[to], str(packets))

    def lab(self) -> dict[str, Any]:
        (found,) = json.loads(self("status", "--json"))["labs"]
        return dict(found)

    def counters(self, host: str, way: str) -> dict[str, int]:
        return dict(self.lab()["counters"][host][way])


@pytest.fixture
def cli(
    state_dir: Path, unchanged_host: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cli]:
    run = Cli(state_dir, capfd)
    for key in ("DBLP_NETEM_STATE_DIR", "COLUMNS"):
        monkeypatch.setenv(key, run.environment[key])
    yield run
    for lab in json.loads(run("status", "--json"))["labs"]:
        run("down", lab["id"])


def test_loss_hits_one_direction_of_one_host_and_is_counted(cli: Cli) -> None:
    cli.up()
    said = cli("impair", "worker1", "--down", "--loss", "30%")
    assert "worker1.down  loss 30%   (topology: as fast as the machine)" in said
    cli.send("worker2", "worker1", 2000)
    cli.send("worker2", "worker3", 500)
    cli.send("worker1", "worker3", 500)
    down = cli.counters("worker1", "down")
    assert down["packets"] + down["injected"] == pytest.approx(2000, abs=20)  # neighbours ask now and then
    assert down["injected"] == pytest.approx(600, abs=100)
    assert [cli.counters(*end)["injected"] for end in (("worker3", "down"), ("worker1", "up"))] == [0, 0]
    assert cli.lab()["links"] == {"worker1.down": "loss 30%"}


def test_another_change_keeps_what_it_does_not_name_and_the_counts(cli: Cli) -> None:
    cli.up()
    cli("impair", "worker1", "--down", "--loss", "50%", "--rate", "1 Gbit")
    cli.send("worker2", "worker1", 400)
    before = cli.counters("worker1", "down")["injected"]
    assert before > 100
    said = cli("impair", "worker1", "--down", "--rate", "10 Mbit", "--queue", "3 kB")
    assert "worker1.down  rate 10 Mbit, loss 50%, queue 3000 B" in said
    cli.send("worker2", "worker1", 400)
    after = cli.counters("worker1", "down")
    assert after["injected"] > before + 100
    assert after["queue"] > 50  # 3 kB hold five of these
    cli("impair", "--clear", "worker1")
    cli.send("worker2", "worker1", 400)
    cleared = cli.counters("worker1", "down")
    assert (cleared["injected"], cleared["queue"]) == (after["injected"], after["queue"])
    assert cli.lab()["links"] == {}


def test_up_is_from_the_host_to_the_switch(cli: Cli) -> None:
    cli.up()
    cli("impair", "worker*", "--up", "--loss", "40%", "--rate", "500 Mbit")
    cli.send("worker1", "server", 1000)
    up = cli.counters("worker1", "up")
    assert up["injected"] == pytest.approx(400, abs=90)
    assert cli.counters("server", "down")["packets"] == pytest.approx(1000 - up["injected"], abs=20)
    assert set(cli.lab()["links"]) == {f"worker{n}.up" for n in (1, 2, 3)}
    cli("impair", "star3", "worker*", "--up", "--loss", "none", "--rate", "none")
    cli.send("worker1", "server", 300)
    assert cli.counters("worker1", "up")["injected"] == up["injected"]


def test_a_lab_that_has_properties_keeps_its_own(cli: Cli) -> None:
    cli.up("--set", "links.0.rate=1 Gbit", "--set", "links.1.loss=10%")
    cli("impair", "worker2", "--down", "--set", "loss=20%")
    links = cli.lab()["links"]
    assert links["worker1.down"] == links["worker2.up"] == "loss 10%"
    assert links["worker2.down"] == "loss 20%"
    assert links["server.up"] == "rate 1 Gbit"
    cli("impair", "star3", "--clear")
    assert cli.lab()["links"]["worker2.down"] == "loss 10%"
    cli.send("worker1", "worker3", 1000)  # the loss of both their links, and not the server's
    dropped = cli.counters("worker1", "up")["injected"] + cli.counters("worker3", "down")["injected"]
    assert dropped == pytest.approx(190, abs=70)


def test_what_something_else_has_changed_is_not_written_over(cli: Cli) -> None:
    cli.up()
    cli("impair", "worker1", "--down", "--rate", "100 Mbit")
    lab = cli.lab()
    record = read(cli.state_dir, lab["id"])
    links = json.loads(json.dumps(record.links).replace("100 Mbit", "200 Mbit"))
    LabState.look(cli.state_dir, lab["id"]).set_links(links)
    assert "find the queue of port to worker1: read back tbf" in cli(
        "impair", "worker1", "--down", "--loss", "1%", status=1
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("worker9", "--loss", "1%"), 2, "'worker9' is not a host"),
        (("worker1", "--loss", "1"), 2, "loss: 1 has no unit"),
        (("worker1", "--rate", "5 MB"), 2, "unknown unit 'MB'"),
        (("worker1",), 2, "give properties, or --clear, or --show"),
        (("worker1", "--clear", "--loss", "1%"), 2, "give properties, or --clear, or --show"),
        (("nolab", "worker1", "--loss", "1%"), 2, "no lab nolab"),
        (("worker1", "--jitter", "1 ms"), 2, "jitter without a rate"),
    ],
    ids=str,
)
def test_mistakes_change_nothing(cli: Cli, arguments: tuple[str, ...], status: int, message: str) -> None:
    cli.up()
    assert message in cli("impair", *arguments, status=status)
    assert cli.lab()["links"] == {}


def test_a_backend_that_cannot_delay_says_which_one_can(cli: Cli) -> None:
    from netem.preflight import probe

    cli.up()
    if probe(cli.state_dir)["netem"].ok:
        assert "delay 5 ms" in cli("impair", "worker1", "--down", "--delay", "5 ms")
        return
    assert "available with: netem" in cli("impair", "worker1", "--down", "--delay", "5 ms", status=4)
    assert cli.lab()["links"] == {}


def test_without_a_lab_and_with_a_lab_of_a_run(cli: Cli, state_dir: Path) -> None:
    assert "no lab is up" in cli("impair", "worker1", "--loss", "1%", status=2)
    from netem.lab import Lab
    from netem.spec import load_topology

    with Lab.build(load_topology("star3"), state_dir=state_dir) as lab:
        assert "is not one of `up`" in cli("impair", "worker1", "--loss", "1%", status=1)
        assert "is not one of `up`" in cli("impair", lab.id, "--show", status=1)
        assert cli.counters("worker1", "down")["injected"] == 0


def test_status_needs_no_privileges_but_for_the_counters(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.up()
    cli("impair", "worker1", "--loss", "5%")
    text = cli("status")
    assert "injected" in text
    assert "worker1.up: loss 5%" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "no lab other; there are star3" in cli("status", "other", status=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        text = cli("status", "star3")
    assert "counters need root" in text
    assert "worker1.up: loss 5%" in text


def test_watch_shows_it_live_until_ctrl_c(cli: Cli) -> None:
    cli.up()
    ours, theirs = os.openpty()
    with subprocess.Popen(
        cli.argv("status", "--watch"), cwd=ROOT, env=cli.environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as watching:
        os.close(theirs)
        seen, deadline = b"", time.monotonic() + TIMEOUT_S
        while b"Mbit/s" not in seen:
            assert time.monotonic() < deadline
            seen += os.read(ours, 65536)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(TIMEOUT_S) == 0
    os.close(ours)
