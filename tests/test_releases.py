"""Which releases of torch and transformers the pages say that the tests were run with."""

from pathlib import Path

import pytest

from tests.support.releases import rows, with_row

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "releases.md"
PAGES = ("README.md", "docs/guides/install.md")


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="in source checkouts only")
def test_what_the_pages_tell_of_releases_was_run() -> None:
    """Without a table on a page there is nothing to hold: a run by itself breaks no test."""
    text = TABLE.read_text() if TABLE.exists() else ""
    ran = {tuple(row[:3]) for row in rows(text) if row[3] == "0"}
    assert not_run({page: (ROOT / page).read_text() for page in PAGES}, ran) == []


def not_run(pages: dict[str, str], ran: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows of the pages' tables of releases that are none of those that ran."""
    told = [(page, *row) for page, text in pages.items() for row in rows(table_of(text))]
    return [row for row in told if row[1:] not in ran]


def test_a_number_that_no_run_gave_is_found() -> None:
    page = "| torch | transformers | tests passed |\n|---|---|---|\n| 2.15.0 | 5.24.0 | 9 |\n\nOn"
    assert not_run({"page": page}, {("2.15.0", "5.24.0", "9")}) == []
    assert not_run({"page": page}, {("2.15.0", "5.24.0", "8")}) == [
        ("page", "2.15.0", "5.24.0", "9")
    ]


def table_of(text: str) -> str:
    """Return the table whose head is torch, transformers and tests passed."""
    _, _, rest = text.partition("| torch | transformers | tests passed |\n")
    return rest.partition("\n\n")[0]


def test_a_run_replaces_the_row_of_its_releases() -> None:
    old = ["2.9.1", "5.0.0", "7", "0", "0", "2026-01-01"]
    new = ["2.15.0+cu132", "5.24.0", "1,200", "2", "3", "2026-11-29"]
    text = with_row(with_row("", new), old)
    assert rows(text) == [old, new]
    again = [*old[:2], "9", "0", "0", "2026-01-02"]
    assert rows(with_row(text, again)) == [again, new]
