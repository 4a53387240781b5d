"""The expression language of expectations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.analysis import expect
from netem.analysis.expect import ExpectError, check, check_all, evaluate

VALUES: dict[str, expect.Value | None] = {
    "fidelity.faithful": True,
    "dblp.burst_latency.max": 0.010,
    "mlt.burst_latency.max": 0.020,
    "dblp.burst_rounds.phase": ("normal", "normal"),
    "dblp.burst_rounds.passes": (8.0, 9.0, 10.0),
    "dblp.accuracy": 0.97,
    "dblp.perplexity": None,
    "dblp-paper.accuracy": 0.5,
}


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("dblp.burst_latency.max < 0.7 * mlt.burst_latency.max", True),
        ("dblp.burst_latency.max < 0.4 * mlt.burst_latency.max", False),
        ("dblp.burst_rounds.phase == normal", True),
        ("dblp.burst_rounds.phase == critical", False),
        ("dblp.burst_rounds.phase == 'normal'", True),
        ("dblp.accuracy >= 95%", True),
        ("dblp.accuracy >= 0.95", True),
        ("dblp.burst_latency.max <= 10 ms", True),
        ("dblp.burst_latency.max < 9999us", False),
        ("dblp.burst_latency.max < 5 ms or dblp.accuracy > 90%", True),
        ("not (dblp.accuracy > 90%) and 1 < 2", False),
        ("8 <= dblp.burst_rounds.passes <= 10", True),
        ("dblp.burst_rounds.passes < 10", False),
        ("dblp.burst_rounds.passes / 2 < 5.5", True),
        ("(mlt.burst_latency.max - dblp.burst_latency.max) / dblp.burst_latency.max == 1", True),
        ("-dblp.accuracy < 0", True),
        ("dblp-paper.accuracy < dblp.accuracy", True),
        ("dblp.accuracy-0.5 > 0.4", True),
        ("fidelity.faithful", True),
        ("fidelity.faithful == true and dblp.accuracy != 0", True),
    ],
)
def test_verdicts(text: str, held: bool) -> None:
    assert evaluate(text, VALUES).held is held


def test_the_detail_has_the_values() -> None:
    detail = evaluate("dblp.burst_latency.max < 0.7 * mlt.burst_latency.max", VALUES).detail
    assert detail == "dblp.burst_latency.max = 0.01, mlt.burst_latency.max = 0.02"
    assert evaluate("dblp.burst_rounds.phase == normal", VALUES).detail == "dblp.burst_rounds.phase = normal"


@pytest.mark.parametrize("text", ["dblp.perplexity < 3", "dblp.accuracy / 0 > 1", "dblp.nothing > 1"])
def test_what_has_no_value_has_no_verdict(text: str) -> None:
    assert evaluate(text, VALUES).held is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an expectation is a text"),
        ("dblp.acuracy > 95%", "did you mean dblp.accuracy"),
        ("mtl.accuracy > 95%", "did you mean mlt.accuracy"),
        ("dblp.burst_rounds.phase == nomal", "did you mean normal"),
        ("dblp.accuracy", "not a condition"),
        ("dblp.accuracy + 1", "not a condition"),
        ("dblp.accuracy = 95%", "compare with =="),
        ("dblp.accuracy > 95 percent", "unknown unit 'percent'"),
        ("dblp.latency.max < 10 sec", "unknown unit 'sec'; allowed|unknown unit 'sec'"),
        ("dblp.burst_rounds.phase < 3", "compares the text 'normal' with a number"),
        ("dblp.burst_rounds.phase < normal", "compares"),
        ("dblp.accuracy == true", "compares"),
        ("dblp.burst_rounds.phase * 2 == normal", "calculates with the text"),
        ("dblp.accuracy ** 2 > 0", "operator"),
        ("__import__('os').system('true')", "not allowed|unknown name"),
        ("dblp.accuracy.__class__ == 1", "unknown name"),
        ("[1, 2] == 1", "not allowed"),
        ("dblp.accuracy in dblp.accuracy", "not allowed"),
        ("(lambda: 1)() == 1", "not allowed"),
        ("dblp.accuracy > ", "not an expression"),
        ("dblp.accuracy and 1 > 0", "is a value, not a condition"),
        ("1 < 2", "names no result"),
        ("normal == normal", "names no result"),
        ("dblp.accuracy / 0 > 1", "divides by zero"),
        ("dblp.accuracy / (2 - 2) > 1", "divides by zero"),
    ],
)
def test_what_cannot_hold_is_refused_before_a_run(text: str, message: str) -> None:
    with pytest.raises(ExpectError, match=message):
        check(text, ["dblp", "mlt"])


@pytest.mark.parametrize(
    "text",
    [
        "dblp.burst_rounds.phase == normal",
        "mlt.burst_latency.max / (dblp.burst_latency.max - dblp.latency.mean) > 1",
        "dblp.total < 60 s",
        "mlt.latency.p99_9 < 1 s",
        "dblp.burst_rounds.loss > 80%",
        "dblp.replicas.identical and fidelity.faithful",
    ],
)
def test_what_a_run_can_tell_is_accepted(text: str) -> None:
    check(text, ["dblp", "mlt"])


@pytest.mark.parametrize(
    ("text", "trains", "bursts", "words"),
    [
        ("dblp.accuracy > 95%", False, True, "a replay trains no model"),
        ("dblp.latency.max < 1 s or dblp.train_loss < 1", False, True, "dblp.train_loss has no value"),
        ("dblp.perplexity < 1", False, True, "a replay trains no model"),
        ("dblp.burst_rounds.phase == normal", True, False, "the scenario has no bursts"),
        ("dblp.burst_latency.max < 1 s", True, False, "the scenario has no bursts"),
    ],
)
def test_what_a_scenario_cannot_tell_is_refused(text: str, trains: bool, bursts: bool, words: str) -> None:
    check(text, ["dblp"])
    with pytest.raises(ExpectError, match=words):
        check(text, ["dblp"], trains=trains, bursts=bursts)


@pytest.mark.parametrize(
    "text",
    ["dblp.accuracy + " * 200 + "1", "x" * 3000, "dblp.accuracy > 1" + "y" * 3000, f"dblp.total == '{'z' * 3000}'"],
)
def test_messages_repeat_no_more_than_the_beginning(text: str) -> None:
    with pytest.raises(ExpectError) as caught:
        check(text, ["dblp"])
    assert len(str(caught.value).partition("; known are")[0]) < 400


def test_errors_carry_the_place_in_the_file() -> None:
    def error(path: tuple[str | int, ...], message: str) -> Exception:
        return KeyError(path, message)

    check_all(["dblp.accuracy > 95%"], ["dblp"], error)
    with pytest.raises(KeyError) as caught:
        check_all(["dblp.accuracy > 95%", "dblp.acuracy > 95%"], ["dblp"], error)
    assert caught.value.args[0] == ("expect", 1)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_raise_expect_error(text: str) -> None:
    try:
        check(text, ["dblp"])
    except ExpectError:
        pass
