"""Settings: from a file and by hand, refused in words a person can act on."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from pd_rerank.config import RerankSettings, load
from pd_rerank.errors import BadArgument, MissingResource


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_typed_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "pools: p.jsonl\nwindow-size: 10\nseed: 3\npartition: round-robin\n")
    settings = load(RerankSettings, file=file, given={"seed": 7, "window_size": None})
    assert (settings.window_size, settings.seed, settings.presentations) == (10, 7, 1)
    assert settings.partition == "round_robin"
    assert settings.pools == Path("p.jsonl")


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert load(RerankSettings, file=config(tmp_path, ""), given={"pools": "p"}).window_size == 20


def test_an_unknown_key_is_named_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"c\.yaml: unknown key 'windw-size'; did you mean window_size"):
        load(RerankSettings, file=config(tmp_path, "pools: p\nwindw-size: 3\n"))
    with pytest.raises(BadArgument, match=r"unknown key 'zzz'; known are run, corpus, topics"):
        load(RerankSettings, file=config(tmp_path, "zzz: 3\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "a config file is a list of 'key: value' lines, this is a list"),
        ("a: [\n", "is not YAML"),
        ("pools: p\nwindow-size: 0\n", r"^--window-size: input should be greater than or equal to 1, got 0$"),
        ("pools: p\nwindow-size: many\n", r"^--window-size: input should be a valid integer.*, got 'many'$"),
        ("pools: p\nrun-tag: 2024\n", r"^--run-tag: input should be a valid string, got 2024$"),
        ("pools: p\npartition: robin\n", r"--partition: input should be 'round_robin', 'contiguous' or 'hashed', got"),
        ("run: r\n", r"give --pools, or --run, --corpus and --topics \(--corpus, --topics missing\)"),
        ("pools: p\nrun: r\n", r"--pools holds texts and queries already; leave out --run"),
        ("pools: p\nhits: 10\n", r"--hits is for a run; pools are taken as they are"),
        ("pools: p\nsettle: true\n", r"--settle needs --presentations 3 or more"),
        ("pools: p\nsettle: true\npresentations: 5\n", r"--settle needs a decision: give --threshold or --top-k"),
    ],
)
def test_a_faulty_file_is_refused_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadArgument, match=says) as caught:
        load(RerankSettings, file=config(tmp_path, text))
    assert "\n" not in str(caught.value) or "YAML" in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResource, match="no config file"):
        load(RerankSettings, file=tmp_path / "none.yaml")


def test_settings_cannot_be_changed() -> None:
    settings = load(RerankSettings, given={"pools": "p"})
    with pytest.raises(pydantic.ValidationError):
        settings.seed = 3  # type: ignore[misc]


def test_every_setting_has_a_help_text() -> None:
    for name, field in RerankSettings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_a_yes_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"'presentations' is true, which means yes or no"):
        load(RerankSettings, file=config(tmp_path, "pools: p\npresentations: yes\n"))
    given = load(RerankSettings, file=config(tmp_path, "pools: p\nplaceholder: 0\nmerge-adapter: yes\n"))
    assert (given.placeholder, given.merge_adapter) == ("0", True)


@pytest.mark.parametrize("text", ["top-k: 3\ntop-k: 4\n", "top-k: 3\ntop_k: 4\n"])
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadArgument, match="'top_k' is there twice; keep one"):
        load(RerankSettings, file=config(tmp_path, text))
