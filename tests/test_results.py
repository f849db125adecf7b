"""What is published: results that say where they come from, and a model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import needed

import annotated_transformer as book
from tools import results

FILES = sorted(results.RESULTS.glob("multi30k-*.json"))
MODEL = results.RESULTS / "model-de-en"
MODELS = sorted(results.RESULTS.glob("model-*"))
AVERAGE = "python annotated_transformer.py average"
COMMANDS = (
    "python annotated_transformer.py train",
    "torchrun --nproc-per-node=2 annotated_transformer.py train",
)


def test_the_tables_are_those_of_the_results():
    stale = results.tables(write=False)
    assert stale == [], "`make tables`, or `git checkout results`"


@pytest.mark.parametrize(
    "wrong",
    ["<!-- end multi30k -->", "<!-- end of multi31k -->", ""],
    ids=["another word", "another name", "none"],
)
def test_a_marker_that_is_lost_is_noticed(wrong):
    """Else the table between would be left as it is, whatever it says."""
    book = results.ROOT / "annotated_transformer.py"
    text, end = book.read_text("utf-8"), "# <!-- end of multi30k -->"
    assert text.count(end) == 1
    results.with_tables(text, "# ")  # nothing to complain of
    with pytest.raises(SystemExit, match="multi3"):
        results.with_tables(text.replace(end, wrong and f"# {wrong}"), "# ")


def test_moses_cuts_an_article_from_its_noun_and_13a_does_not():
    needed("sacremoses")
    [cut] = results.moses("fr", ["L'homme n'a rien, dit-il."])
    assert cut == "l' homme n' a rien , dit-il ."
    rows = json.loads((results.RESULTS / "words.json").read_text("utf-8"))
    counts = {
        row["direction"]: [
            row[rule]["reference_words"] for rule in ("13a", "moses")
        ]
        for row in rows["rows"]
    }
    assert counts["en-fr"][1] > 1.03 * counts["en-fr"][0]
    for direction in ("en-de", "de-en"):
        usual, other = counts[direction]
        assert abs(usual - other) < 0.002 * usual


def test_a_model_without_a_result_is_not_published(tmp_path):
    args = SimpleNamespace(name="misspelt", run=MODEL, folder=tmp_path / "new")
    with pytest.raises(SystemExit, match="misspelt.json is not there"):
        results.publish(args)
    assert not args.folder.exists()


def test_a_model_without_a_log_is_not_published(tmp_path):
    """Neither in part: the old weights would stand beside a new card."""
    run = shutil.copytree(MODEL, tmp_path / "mean")
    (run / "log.jsonl").unlink()
    args = SimpleNamespace(
        name="multi30k-de-en-2", run=run, folder=tmp_path / "new", log=None
    )
    with pytest.raises(SystemExit, match="name one by --log"):
        results.publish(args)
    assert not args.folder.exists()


@pytest.mark.parametrize(
    "more, said",
    [
        (dict(before="misspelt"), "misspelt.json is not there"),
        (dict(of=["multi30k-de-en", "misspelt"]), "misspelt.json is not"),
        (dict(device="an NVIDIA H200"), "number of cores"),
    ],
)
def test_what_a_result_can_not_be_is_said_at_once(more, said, monkeypatch):
    """Else the tables would stumble over it later."""
    monkeypatch.setattr(book, "measure", lambda *_: pytest.fail("measured"))
    facts = dict(run=MODEL, of=None, before=None, device="two cores of a")
    with pytest.raises(SystemExit, match=said):
        results.record(SimpleNamespace(**facts | more))


def test_runs_that_are_collected_again_take_their_old_place(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    run = shutil.copytree(MODEL, tmp_path / "levers" / "plain-0")
    (run / "options.txt").write_text("", encoding="utf-8")
    args = SimpleNamespace(
        folder=run.parent, add=True, commit="c", device="d", corpus=""
    )
    with pytest.raises(SystemExit, match="--add to what"):
        results.levers(args)
    args.add = False
    results.levers(args)
    first = (tmp_path / "levers.json").read_bytes()
    args.add = True
    results.levers(args)
    assert (tmp_path / "levers.json").read_bytes() == first
    shutil.copytree(run, run.with_name("plain-1"))
    results.levers(args)
    runs = json.loads((tmp_path / "levers.json").read_text("utf-8"))["runs"]
    assert [row["seed"] for row in runs] == [0, 1]


@pytest.mark.parametrize("chosen", [None, (8, 0.1)])
def test_only_the_models_named_are_read_back(tmp_path, monkeypatch, chosen):
    """Another one of the same languages keeps its figures."""
    stored = (results.RESULTS / "reading.json").read_bytes()
    before = json.loads(stored)["rows"]
    (tmp_path / "reading.json").write_bytes(stored)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "best_by_hindsight", lambda *_: 50.0)
    monkeypatch.setattr(results, "measured_back", lambda *_: {"bleu": 1.5})
    monkeypatch.setattr(book, "corpus_part", lambda *_: [])
    named = ["model-en-de", "model-de-en"]
    args = SimpleNamespace(
        models=[f"results/{name}" for name in named], chosen=chosen,
        settled=None, corpus="", alpha=1.5, commit="c", device="d",
    )  # fmt: skip
    monkeypatch.chdir(results.ROOT)
    results.reading(args)
    rows = json.loads((tmp_path / "reading.json").read_text("utf-8"))["rows"]
    kept = json.loads((tmp_path / "reading.json").read_text("utf-8"))
    assert kept.keys() >= json.loads(stored).keys()  # hindsight, commits
    others = [row for row in rows if row["model"] not in named]
    assert others == [row for row in before if row["model"] not in named]
    assert {row["direction"] for row in others} >= {"de-en"}
    part = results.TEST if chosen else "val"
    new = [row for row in rows if row.get(part) == {"bleu": 1.5}]
    each = 3 if chosen else len(results.READINGS)
    assert [row["model"] for row in new] == sorted(named * each)[::-1]
    assert len(rows) == len(before)


def test_what_validation_did_not_try_is_not_measured(tmp_path, monkeypatch):
    """Nothing is written then, neither when nor by which commit."""
    stored = (results.RESULTS / "reading.json").read_bytes()
    (tmp_path / "reading.json").write_bytes(stored)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "measured_back", lambda *_: {"bleu": 1.5})
    monkeypatch.setattr(book, "corpus_part", lambda *_: [])
    args = SimpleNamespace(
        models=["results/model-en-de", "results/model-de-en"], corpus="",
        chosen=(7, 0.1), settled=None, alpha=1.5, commit="c", device="d",
    )  # fmt: skip
    monkeypatch.chdir(results.ROOT)
    with pytest.raises(SystemExit, match="no such beam"):
        results.reading(args)
    assert (tmp_path / "reading.json").read_bytes() == stored


def test_a_stale_table_is_noticed(tmp_path, monkeypatch):
    fake = json.loads(FILES[0].read_text("utf-8"))
    fake[results.TEST]["bleu"] += 1
    for path in results.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / FILES[0].name).write_text(json.dumps(fake), "utf-8")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert (
        results.tables(write=False)
        == [
            name
            for name in results.PLACES
            if "<!-- multi30k" in (results.ROOT / name).read_text("utf-8")
        ]
        == ["README.md", "annotated_transformer.py"]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_result_says_where_it_comes_from(path):
    facts = json.loads(path.read_text(encoding="utf-8"))
    for stage in results.stages(facts):
        assert stage["command"].startswith(COMMANDS)
        assert stage["minutes"] > 0 and stage["steps"] > 0
        assert stage["seed"] == stage["recipe"]["seed"]
        assert len(stage["commit"]) >= 7 and stage["device"]
    assert len(facts["commit"]) >= 7 and facts["device"]
    if "mean_of" in facts:
        assert facts["command"].startswith(AVERAGE)
        assert facts["command"].count("--model") == len(facts["mean_of"])
    for part in ("val", results.TEST):
        measured = facts[part]
        assert measured["parameters"] > 1e6
        assert "case:lc" in measured["signature"]
        assert "tok:13a" in measured["signature"]
        assert measured["sentences"] == {"val": 1014}.get(part, 1000)
        assert 0 < measured["bleu"] < 100
        if not facts.get("lowercase"):
            assert 0 < measured["bleu_cased"] <= measured["bleu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_of_each_result_still_means_its_recipe(path):
    """What the options leave out is the preset's, as it was then."""
    for stage in results.stages(json.loads(path.read_text("utf-8"))):
        command = stage["command"].partition("annotated_transformer.py")[2]
        args = book.parser().parse_args(shlex.split(command))
        if args.run is not book.run_train:
            continue
        # What pays, and what processes have room for, is the machine's.
        for name in ("half", "onednn", "max_tokens"):
            if getattr(args, name) is None:
                setattr(args, name, stage["recipe"].get(name, False))
        recipe, sizes, pieces = book.settings_of(args)
        for name, value in stage["recipe"].items():
            assert getattr(recipe, name) == value, name
        if not args.start:  # else the sizes are those of that model
            sizes["src_vocab"] = pieces
            for name in sizes.keys() & stage["config"].keys():
                assert stage["config"][name] == sizes[name], name


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_a_published_model_is_small_and_only_tensors(folder):
    assert (folder / "weights.pt").stat().st_size <= 6_000_000
    state = torch.load(folder / "weights.pt", weights_only=True)
    assert {w.dtype for w in state.values()} == {torch.float16}
    facts = book.load_description(folder)
    assert facts["corpus"] == "multi30k"
    src, tgt = facts["languages"]
    assert folder.name in SAYINGS
    assert folder.name.removesuffix("-more") == f"model-{src}-{tgt}"
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_a_card_names_the_whole_training(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    command = r"^.*annotated_transformer.py (?:train|average) .*$"
    *_, last = re.findall(command, card, re.M)
    facts = [json.loads(path.read_text("utf-8")) for path in FILES]
    [result] = [result for result in facts if result["command"] == last]
    places = [card.index(s["command"]) for s in results.stages(result)]
    assert places == sorted(places)
    for words in ("research and education", "**Limits.**", "**Scores"):
        assert words in card


def stage(name, steps, minutes, **more):
    """A recorded training, with what the table needs."""
    recipe = dict(seed=more.pop("seed", 0), both=False, r_drop=0)
    scores = dict(bleu=40.0, bleu_cased=39.0, chrf=64.0)
    return {
        "direction": "en-de", "command": f"train {name}", "commit": name,
        "device": "two cores", "seed": recipe["seed"], "steps": steps,
        "minutes": minutes, "recipe": recipe,
        "config": {"src_vocab": 10_000, "d_model": 128},
        "val": scores, results.TEST: scores, **more,
    }  # fmt: skip


def test_a_mean_has_all_its_trainings_each_once(tmp_path, monkeypatch):
    made = {
        "first": stage("first", 7000, 100),
        "on": stage("on", 2000, 30, before="first", device="one core"),
        "other": stage("other", 3000, 50, before="first", seed=1),
    }
    mean = stage("mean", 0, 0, mean_of=["first", "on", "other"])
    for key in ("seed", "steps", "minutes", "recipe"):
        del mean[key]
    for name, facts in (made | {"multi30k-mean": mean}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(facts), "utf-8")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.stages(mean) == [*made.values()]
    text = results.training_text(mean)
    commands = re.findall("^train .*$", text, re.M)
    assert commands == [f"train {name}" for name in (*made, "mean")]
    assert "the mean of these 3 models" in text
    [row], [source] = table_and_sources()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "en-de 1, mean"
    assert cells[-4:] == ["12", "0–1", "2+1", "180"]
    assert source == "* en-de 1: `mean` (`first`+`on`+`other`+`mean`)"


def table_and_sources():
    """The rows of the table, and the files and commits of each."""
    lines = results.multi30k_table()
    rows = [line for line in lines[2:] if line.startswith("|")]
    return rows, [line for line in lines if line.startswith("* ")]


def test_a_run_may_begin_with_a_mean(tmp_path, monkeypatch):
    """The card names the mean's command, too; in the table it is one link."""
    made = {
        "first": stage("first", 7000, 100),
        "other": stage("other", 3000, 50),
    }
    mean = stage("mean", 0, 0, mean_of=[*made])
    for key in ("seed", "steps", "minutes", "recipe"):
        del mean[key]
    last = stage("last", 500, 7, before="mean", note="from the mean")
    files = made | {"mean": mean, "multi30k-last": last}
    for name, facts in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(facts), "utf-8")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    text = results.training_text(last)
    commands = re.findall("^train .*$", text, re.M)
    assert commands == [f"train {name}" for name in (*made, "mean", "last")]
    assert "the mean of these 2 models" in text
    assert text.endswith("(from the mean)")
    [row], [source] = table_and_sources()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "en-de 1"
    assert cells[-4:] == ["10+0.5", "0", "2", "157"]
    assert source == "* en-de 1: `last` (`first`+`other`+`mean`+`last`)"


def test_seeds_of_one_recipe_share_a_line(tmp_path, monkeypatch):
    """Whatever their commits and the bits of their products; no others do."""
    runs = [stage(f"c{n}", 1000, 10 * n) for n in range(5)]
    for seed, (run, bleu) in enumerate(zip(runs, (40, 41, 45, 39, 38))):
        run["seed"] = run["recipe"]["seed"] = seed
        run["recipe"]["half"] = seed % 2 == 0
        run[results.TEST]["bleu"] = bleu
    runs[3]["recipe"]["factor"] = 2.0  # another recipe
    runs[4]["device"] = "one core"  # and other minutes
    runs.append(stage("c5", 1000, 50) | {"direction": "en-fr"})
    wide = {"src_vocab": 10_000, "d_model": 256}  # another model
    runs.append(stage("c6", 1000, 60) | {"config": wide})
    for number, facts in enumerate(runs):
        path = tmp_path / f"multi30k-{number}.json"
        path.write_text(json.dumps(facts), "utf-8")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    rows, sources = table_and_sources()
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows]
    seeds = [(row[0], row[-3]) for row in cells]
    assert seeds == [
        ("en-de 1", "0\u20132"), ("en-de 2", "3"), ("en-de 3", "4"),
        ("en-fr 1", "0"), ("en-de 4, wide", "0"),
    ]  # fmt: skip
    three = cells[0]
    assert three[1] == "42.0\u00b12.6" and three[-1] == "10"
    first, *_, last = sources
    assert first == "* en-de 1: `0`, `1`, `2` (`c0` and `c1` and `c2`)"
    assert last == "* en-de 4: `6` (`c6`)"


def test_a_gain_is_of_means_and_only_of_what_was_measured():
    def run(bleu, part="val"):
        return {part: {"bleu": bleu}}

    one, other = [run(40.3), run(41.3)], [run(40.0)]
    assert results.gain(one, other, "val", "bleu") == "+0.8"
    assert results.gain(other, one, "val", "bleu") == "-0.8"
    assert results.gain([run(39.98)], other, "val", "bleu") == "+0.0"
    unmeasured = run(40, results.TEST)
    assert results.gain([run(41), unmeasured], other, "val", "bleu") == "–"
    assert results.gain(other, [unmeasured], "val", "bleu") == "–"


def test_each_gain_compares_runs_of_one_direction():
    for what, *sides in results.GAINS:
        names = [[n] if isinstance(n, str) else n for n in sides]
        found = {results.read(n)["direction"] for side in names for n in side}
        assert len(found) == 1, what


def test_the_book_finds_it_and_does_without(tmp_path, monkeypatch, capsys):
    assert book.published_model().resolve() == MODEL
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(book, "__file__", str(tmp_path / "book.py"))
    assert book.published_model() is None
    book.the_published_model()
    assert "train --corpus multi30k" in capsys.readouterr().out
    assert book.attention_on_captions() is None
    assert book.a_beam_on_a_caption() is None
    assert book.how_it_learned() is None


FROM_GERMAN = (
    ("Ein Mann schläft auf einem Sofa.", "man", "couch|sofa"),
    ("Zwei Hunde spielen im Schnee.", "two dogs", "snow"),
)
TO_FRENCH = (
    ("A man is sleeping on a couch.", "homme", "dort"),
    ("Two dogs are playing in the snow.", "deux chiens", "neige"),
)
SAYINGS = {
    "model-de-en": FROM_GERMAN,
    "model-de-en-more": FROM_GERMAN,
    "model-en-de": (
        ("A man is sleeping on a couch.", "mann", "schläft"),
        ("Two dogs are playing in the snow.", "zwei hunde", "schnee"),
    ),
    "model-en-fr": TO_FRENCH,
    "model-en-fr-more": TO_FRENCH,
    "model-fr-en": (
        ("Un homme dort sur un canapé.", "man", "couch|sofa"),
        ("Deux chiens jouent dans la neige.", "two dogs", "snow"),
    ),
}


def test_they_translate_in_a_fresh_process_without_network(tmp_path):
    blocked = tmp_path / "blocked.py"
    blocked.write_text(
        "import json, socket, sys\n"
        "def refuse(*_, **__):\n"
        "    raise RuntimeError('the network was asked')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import annotated_transformer as book\n"
        "for command in json.loads(sys.argv[2]):\n"
        "    assert book.main(command) == 0\n",
        encoding="utf-8",
    )
    home = Path(book.__file__).resolve().parent
    commands = [
        ["translate", "--model", str(folder),
         *(text for text, *_ in SAYINGS[folder.name])]
        for folder in MODELS
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, blocked, home, json.dumps(commands)],
        capture_output=True, text=True, encoding="utf-8", timeout=120,
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = done.stdout.lower().splitlines()
    sayings = [saying for folder in MODELS for saying in SAYINGS[folder.name]]
    for (_, *parts), answer in zip(sayings, answers, strict=True):
        for part in parts:
            assert re.search(part, answer), (part, answer)


def of_its_card(folder):
    """The BLEU and the perplexity on the validation set that are told."""
    lines = (folder / "README.md").read_text("utf-8").splitlines()
    [row] = [line for line in lines if line.startswith("| `val` |")]
    cells = row.split("|")
    return float(cells[2]), float(cells[5])


def validation_pairs(translator, data):
    languages = translator.src, translator.tgt
    return book.corpus_part(str(data / "multi30k"), "val", *languages)


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_it_has_the_perplexity_that_its_card_says(folder, data):
    translator = book.load_translator(folder)
    pairs = validation_pairs(translator, data)
    ids = [translator.encode_texts(*pair) for pair in pairs]
    found = book.perplexity(translator.model, ids)
    assert found == pytest.approx(of_its_card(folder)[1], abs=0.006)


def test_it_scores_what_its_card_says(data):
    """One model: the others' perplexities tell whose weights they have."""
    folder = MODELS[0]
    translator = book.load_translator(folder)
    pairs = validation_pairs(translator, data)
    facts, _ = book.measure(translator, pairs, beam=4, alpha=1.5)
    assert facts["bleu"] == pytest.approx(of_its_card(folder)[0], abs=0.3)
