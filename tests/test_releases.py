"""Which releases of torch and transformers the pages say that the tests were run with."""

from pathlib import Path

import pytest

from tests.support.releases import rows, with_row

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "releases.md"
PAGES = ("README.md", "docs/guides/install.md")


@pytest.mark.skipif(not TABLE.exists(), reason="in source checkouts only")
def test_the_pages_have_the_numbers_of_releases_that_were_run() -> None:
    ran = {tuple(row[:3]) for row in rows(TABLE.read_text()) if row[3] == "0"}
    told = [
        (page, tuple(row)) for page in PAGES for row in rows(table_of((ROOT / page).read_text()))
    ]
    assert told, f"expected a table of releases on one of {PAGES}"
    assert [row for row in told if row[1] not in ran] == []


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
