"""YAML with line numbers: what is read, where errors point, and what YAML can do but a spec must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.spec.source import MAX_NODES, SpecError, parse, read_file


def test_scalars_are_yaml_1_2() -> None:
    root = parse("a: 1\nb: yes\nc: 0..14\nd: 90%\ne: null\nf: 2024-01-01\ng: 010\nh: 1.5\ni: true\nj: 12:30", "f")
    assert root.plain() == {
        "a": 1, "b": "yes", "c": "0..14", "d": "90%", "e": None, "f": "2024-01-01", "g": 10, "h": 1.5, "i": True,
        "j": "12:30",
    }  # fmt: skip


def test_errors_point_at_the_key_that_was_written() -> None:
    root = parse("a: 1\nb:\n  - c: 2\n  - {d: 3,\n     e: 4}\n", "f.yaml")
    error = root.error("wrong", "b", 1, "e")
    assert (error.file, error.line, error.key, error.message) == ("f.yaml", 5, "b.1.e", "wrong")
    assert str(error) == "f.yaml:5: b.1.e: wrong"
    missing = root.error("is required", "b", 0, "x")
    assert (missing.line, missing.key) == (3, "b.0.x")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "the file is empty"),
        ("# a comment\n", None, "the file is empty"),
        ("- a\n- b\n", 1, "the file is a list; a mapping"),
        ("burst90\n", 1, "the file is just 'burst90'"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', already given in line 1"),
        ("a:\n  b: 1\n  b: 1\n", 3, "duplicate key 'b', already given in line 2"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: *x\n", 1, "not valid YAML: found undefined alias"),
        ("a: 1\nb: &x [*x]\n", 2, "an alias that contains itself"),
        ("a: 1\nb: !!python/name:os.system 1\n", 2, "the YAML tag"),
        ("a: !mine {b: 1}\n", 1, "the YAML tag"),
        ("a: {<<: {b: 1}}\n", 1, "use `extends`"),
        ("? [1, 2]\n: 3\n", 1, "a key must be plain text"),
    ],
)
def test_refused_yaml(text: str, line: int | None, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, "f.yaml")
    assert words in caught.value.message
    assert (caught.value.file, caught.value.line) == ("f.yaml", line)


def test_nested_aliases_are_counted_not_expanded() -> None:
    levels = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(SpecError, match=f"more than {MAX_NODES} values"):
        parse("\n".join(levels), "f")


@pytest.mark.parametrize("depth", [60, 600])
def test_very_deep_nesting_is_an_error_not_a_crash(depth: int) -> None:
    with pytest.raises(SpecError, match="nested too deeply"):
        parse("a: " + "[" * depth + "]" * depth, "f")


def test_unreadable_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        read_file(latin)
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_file(tmp_path)
