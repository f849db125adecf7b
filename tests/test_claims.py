"""The paper's claims: each can come out otherwise, and the record is whole."""

import json
from pathlib import Path

import pytest

import annotated_transformer as book

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "results" / "claims.json"
EXAMINED = [name for name, c in book.CLAIMS.items() if c.examine]
QUICK = [name for name in EXAMINED if not book.CLAIMS[name].full]


@pytest.fixture(scope="module")
def record():
    """What `make claims` found."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_record_has_every_claim_as_the_book_states_it(record):
    assert record.keys() == book.CLAIMS.keys()
    for name, claim in book.CLAIMS.items():
        facts = record[name]
        assert facts["section"] == claim.section, name
        assert facts["claim"] == claim.text, name
        assert facts["verdict"] in book.VERDICTS, name
        assert facts["found"] and facts["commit"], name
        assert facts["settings"] == json.loads(json.dumps(claim.full or {}))


def test_every_claim_could_have_come_out_otherwise(record):
    for name in EXAMINED:
        claim, facts = book.CLAIMS[name], record[name]
        assert facts["unless"] == json.loads(json.dumps(claim.unless)), name
        assert facts["otherwise"]["verdict"] != facts["verdict"], name


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_claim_comes_out_as_recorded(name, record):
    claim, facts = book.CLAIMS[name], record[name]
    assert claim.verdict()[0] == facts["verdict"]
    assert claim.verdict(**claim.unless)[0] == facts["otherwise"]["verdict"]


def test_a_claim_is_examined_from_one_seed():
    name = QUICK[0]
    assert book.CLAIMS[name].verdict() == book.CLAIMS[name].verdict()


def test_the_ledger_has_a_line_for_each_claim_in_the_paper_s_order():
    table = book.Ledger({QUICK[0]: ("verified", "a | b")})
    sections = [row[0] for row in table.rows]
    assert len(table.rows) == len(book.CLAIMS)
    assert sections == sorted(sections, key=lambda s: s.split("."))
    assert table.count() == dict.fromkeys(book.VERDICTS, 0) | {"verified": 1}
    lines = table._repr_markdown_().splitlines()
    assert len(lines) == len(book.CLAIMS) + 2
    assert sum("a \\| b" in line for line in lines) == 1
    assert repr(table).count("\n") + 1 == 2 * len(book.CLAIMS)


def test_the_command_keeps_what_it_finds_and_what_was_there(tmp_path, capsys):
    path = tmp_path / "claims.json"
    other = {QUICK[-1]: {"verdict": "kept"}}
    path.write_text(json.dumps(other), encoding="utf-8")
    assert book.main(["claims", QUICK[0], "--out", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found[QUICK[0]]["verdict"] in capsys.readouterr().out
    assert found == {**found, **other}


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"name": "x"}', "3"])
def test_a_file_of_something_else_is_left_alone(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    assert book.main(["claims", QUICK[0], "--out", str(path)]) == 2
    assert "other.json" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == text


def test_a_missing_folder_is_named_before_anything_is_examined(
    tmp_path, capsys
):
    path = tmp_path / "missing" / "claims.json"
    assert book.main(["claims", QUICK[0], "--out", str(path)]) == 2
    shown = capsys.readouterr()
    assert "no such folder" in shown.err and not shown.out


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(tmp_path, capsys):
    path = tmp_path / "claims.json"
    kept = {QUICK[0]: {"verdict": "kept"}}
    path.write_text(json.dumps(kept), encoding="utf-8")
    arguments = ["claims", *QUICK[:2], "--resume", "--out", str(path)]
    assert book.main(arguments) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found == kept | {QUICK[1]: found[QUICK[1]]}
    assert found[QUICK[1]]["verdict"] in book.VERDICTS


def test_two_that_write_one_record_keep_both_findings(tmp_path, monkeypatch):
    """The half hour of all claims may be shared by two cores."""
    path, examine = tmp_path / "claims.json", book.entry

    def meanwhile(name, full):
        if not path.exists():
            other = {QUICK[-1]: {"verdict": "of the other"}}
            path.write_text(json.dumps(other), encoding="utf-8")
        return examine(name, full)

    monkeypatch.setattr(book, "entry", meanwhile)
    assert book.main(["claims", QUICK[0], "--out", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {*found} == {QUICK[0], QUICK[-1]}


def test_a_run_begun_anew_goes_on_with_nothing_old(tmp_path, monkeypatch):
    """Stopped in its second claim; what an earlier run found is not kept."""
    path = tmp_path / "claims.json"
    arguments = ["claims", *QUICK[:2], "--out", str(path)]
    assert book.main([*arguments, "--commit", "old"]) == 0
    examine, calls = book.entry, []

    def stopped(name, full):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return examine(name, full)

    with monkeypatch.context() as patch:
        patch.setattr(book, "entry", stopped)
        assert book.main([*arguments, "--commit", "new"]) == 130
        assert len(calls) == 2
    assert book.main([*arguments, "--resume", "--commit", "new"]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {facts["commit"] for facts in found.values()} == {"new"}
    assert len(found) == 2


def test_what_was_found_is_kept_though_nobody_reads_it(tmp_path, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    path, name = tmp_path / "claims.json", "base_and_big_on_wmt14_german"
    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", gone)
        assert book.main(["claims", name, "--out", str(path)]) == 1
    assert json.loads(path.read_text("utf-8")).keys() == {name}


def test_what_comes_out_otherwise_is_printed(capsys):
    assert book.main(["claims", "recurrence_waits"]) == 0
    assert "with linear=True: not reproduced" in capsys.readouterr().out


def test_a_record_of_the_short_form_is_no_long_form(tmp_path):
    path = tmp_path / "claims.json"
    short = {"verdict": "kept", "command": "claims that were short"}
    path.write_text(json.dumps({QUICK[0]: short}), encoding="utf-8")
    arguments = ["claims", QUICK[0], "--full", "--resume"]
    assert book.main([*arguments, "--out", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))[QUICK[0]]
    assert found["verdict"] != "kept" and "--full" in found["command"]


def test_a_claim_that_is_not_there_is_named(capsys):
    assert book.main(["claims", "that_the_moon_is_cheese"]) == 2
    assert "that_the_moon_is_cheese" in capsys.readouterr().err
