"""Measure trained models, and keep the tables of results true.

python tools/results.py record NAME RUN --corpus DIR --command TEXT
    --commit HASH --device TEXT [--reverse] [--beam W] [--alpha X] [--no-test]
    [--before OTHER]         evaluate a run, write results/NAME.json; OTHER is
    [--of OTHER OTHER...]    the result of the run that it was started from; of
                             a mean, those of the runs that it is the mean of
python tools/results.py publish NAME RUN FOLDER --corpus DIR [--log FILE]
                             the model of a run in 16 bits, to be passed on,
                             with its card; NAME is the recorded result, FILE
                             the log to go with it (that in RUN)
python tools/results.py means LABEL=RUN... --corpus DIR --commit HASH
    --device TEXT            trainings and their means on the validation set;
                             rows of another direction stay
python tools/results.py averaging RUN --corpus DIR --command TEXT
    --commit HASH            the last weights, their mean, and the best
python tools/results.py levers FOLDER --corpus DIR --commit HASH
    --device TEXT [--add]    collect the short runs below FOLDER; beside those
                             that were collected at the same commit before
python tools/results.py heart FOLDER... --corpus DIR --commit HASH
    --device TEXT            models on their own training text, greedily, and
                             on the validation set
python tools/results.py reading ONE OTHER --corpus DIR --commit HASH
    --device TEXT            two models, each alone and read back by the other,
                             on the validation set
python tools/results.py reading ONE OTHER --corpus DIR --commit HASH
    --device TEXT --chosen BEAM WEIGHT
                             once that is done: what was chosen by it, the
                             same with a weight of 0, and the plain beam of
                             four, on the test set
python tools/results.py reading ONE OTHER --corpus DIR --commit HASH
    --device TEXT --settled BEAM WEIGHT
                             the same three of ONE, which had no part in that
                             choice, read back by OTHER, on both sets
python tools/results.py voting MODEL... --corpus DIR --commit HASH
    --device TEXT            models whose lists vote, with beams and powers, on
                             the validation set
python tools/results.py voting MODEL... --corpus DIR --commit HASH
    --device TEXT --chosen BEAM POWER
                             once that is done: what was chosen by it and the
                             plain beam of four, on the test set; of models
                             that had no part in the choice, on both sets
python tools/results.py words MODEL... --corpus DIR --commit HASH --device TEXT
                             their BLEU on the test set by the words that
                             sacreBLEU cuts and by those that Moses does (needs
                             sacremoses, which tests/peers.txt has)
python tools/results.py tables
                             write the tables in README and book anew
python tools/results.py check
                             fail where a table is not what results/ say
"""

import argparse
import collections
import json
import math
import re
import statistics
import sys
import textwrap
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import annotated_transformer as book  # noqa: E402

RESULTS = ROOT / "results"
PLACES = {
    "README.md": "",
    "benchmarks/README.md": "",
    "annotated_transformer.py": "# ",
}
TEST = "test_2016_flickr"


def write_json(path, facts):
    """Write a result, the keys in the order in which they were made."""
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def training_facts(run, log):
    """What a run's own files say of its training."""
    facts = book.load_description(run)
    losses = [line for line in log if "loss" in line]
    scores = [line for line in log if "val_bleu" in line]
    last = {
        "bleu_last": round(scores[-1]["val_bleu"], 2),
        **{
            f"bleu_{key}": round(line[f"{key}_val_bleu"], 2)
            for line in log
            for key in ("average",)
            if f"{key}_val_bleu" in line
        },
    }
    minutes = {line["step"]: line["seconds"] / 60 for line in losses}
    curve = [
        [s["step"], round(minutes[s["step"]], 1), round(s["val_bleu"], 2)]
        for s in scores
        if s["step"] in minutes
    ]
    return {
        "seed": facts["recipe"]["seed"],
        "steps": losses[-1]["step"],
        "minutes": round(losses[-1]["seconds"] / 60, 1),
        "weights_of_step": facts["step"],
        "validation_in_training": last,
        "curve": curve,  # update, minutes, validation BLEU
        "recipe": facts["recipe"],
        "config": facts["config"],
    }


def mean_facts(run, names):
    """What is known of the mean of the runs that were recorded as `names`."""
    facts = book.load_description(run)
    if len(names) != len(facts["mean_of"]):
        sys.exit(f"{run} is the mean of {len(facts['mean_of'])} models")
    return {"mean_of": names, "config": facts["config"]}


def record(args):
    """Evaluate on validation and, last, on the test set; write both."""
    run = Path(args.run)
    for name in [*(args.of or []), *[args.before] * bool(args.before)]:
        if read(name) is None:
            sys.exit(f"results/{name}.json is not there")
    if args.device.split()[:1] not in (["one"], ["two"]):
        sys.exit("--device begins with one or two, the number of cores")
    translator = book.load_translator(run)
    if args.reverse:
        translator = translator.reversed()
    languages = translator.src, translator.tgt
    if args.of:
        said = mean_facts(run, args.of)
    else:
        said = training_facts(run, book.read_log(run))
    facts = {
        "direction": "-".join(languages),
        "command": args.command,
        "commit": args.commit,
        "device": args.device,
        **said,
    }
    if translator.lowercase:
        facts["lowercase"] = True
    if args.before:
        facts["before"] = args.before
    if args.note:
        facts["note"] = args.note
    for part in ("val",) if args.no_test else ("val", TEST):
        pairs = book.corpus_part(args.corpus, part, *languages)
        facts[part], _ = book.measure(translator, pairs, args.beam, args.alpha)
    write_json(RESULTS / f"{args.name}.json", facts)


CARD = ROOT / "tools" / "model-card.md"
NAMES = {"de": "German", "en": "English", "fr": "French"}


def stages(result):
    """Return the results of a training, first that which it began with.

    Of a mean, those of all trainings that it is made of, each once.
    """
    if "before" in result:
        return [*stages(read(result["before"])), result]
    if "mean_of" not in result:
        return [result]
    trained = [s for name in result["mean_of"] for s in stages(read(name))]
    return [s for i, s in enumerate(trained) if s not in trained[:i]]


def links(result):
    """Return the trainings one after another; those of a mean are one link."""
    if "before" in result:
        return [*links(read(result["before"])), [result]]
    return [stages(result)]


def commits_of(result):
    """Return the commits of a training and of what it began with."""
    own = result["commit"]
    if "before" in result:
        return [*commits_of(read(result["before"])), own]
    if "mean_of" in result:
        return [*(s["commit"] for s in stages(result)), own]
    return [own]


STAGE = """```sh
{command}
```

at commit `{commit}`, seed {seed}, {steps:,} updates in {minutes:.0f} minutes \
on {device}{remark}"""
MEAN = """,
and it is the mean of these {count} models, by

```sh
{command}
```

at commit `{commit}`"""


def training_text(result):
    """Return what a card says of how a model was trained."""

    def said(stage):
        remark = f" ({stage['note']})" if stage.get("note") else ""
        return STAGE.format(remark=remark, **stage)

    if "mean_of" in result:  # their own --from tells what began where
        text = ",\nthen by\n\n".join(map(said, stages(result)))
        return text + MEAN.format(count=len(result["mean_of"]), **result)
    if "before" in result:
        before = training_text(read(result["before"]))
        return f"{before},\nand from there by\n\n{said(result)}"
    return said(result)


def cased_of(measured):
    """Return the cased BLEU of what was measured; small letters have none."""
    found = measured.get("bleu_cased")
    return "–" if found is None else f"{found:.2f}"


def publish(args):
    """Write the model of a run in 16 bits, without the path it came from."""
    run, folder = Path(args.run), Path(args.folder)
    facts, result = book.load_description(run), read(args.name)
    if result is None:  # before anything is overwritten
        sys.exit(f"results/{args.name}.json is not there: record it first")
    log = Path(args.log or run / "log.jsonl")
    if not log.exists():
        sys.exit(f"no {log}; name one by --log (a mean has none of its own)")
    if (folder / "README.md").exists() > (folder / "model.json").exists():
        sys.exit(f"{folder} is no published model, and has a README.md")
    log, how = log.read_text(encoding="utf-8"), result["val"]
    if "alpha" not in how:
        sys.exit(f"results/{args.name}.json is greedy; record it with a beam")
    kept = ("preset", "recipe", "step", "val_bleu", "data", "mean_of")
    translator = book.load_translator(run)
    languages = translator.src, translator.tgt
    parts = {
        part: book.corpus_part(args.corpus, part, *languages)
        for part in ("val", TEST)
    }
    book.save_translator(
        translator,
        folder,
        half=True,
        corpus="multi30k",
        **{key: facts[key] for key in kept if key in facts},
    )
    (folder / "log.jsonl").write_text(log, encoding="utf-8")
    again, rows = book.load_translator(folder), []
    for part, pairs in parts.items():
        m, _ = book.measure(again, pairs, how["beam"], how["alpha"])
        rows.append(
            f"| `{part}` | {m['bleu']:.2f} | {cased_of(m)} | "
            f"{m['chrf']:.2f} | {m['perplexity']:.2f} |"
        )
    config = again.model.config
    card = CARD.read_text(encoding="utf-8").format(
        src_name=NAMES[again.src],
        tgt_name=NAMES[again.tgt],
        source="Elliott et al., 2016"
        + (", and for French 2017" if "fr" in languages else ""),
        N=config.N,
        d_model=config.d_model,
        pieces=config.src_vocab,
        rows="\n".join(rows),
        folder=folder.name,
        example=pairs[1][0],  # the first has a slip of the pen
        size=(folder / "weights.pt").stat().st_size / 1e6,
        training=training_text(result),
        log="first" if args.log else "last",
        made="digests of its parts" if "mean_of" in facts else "recipe",
        signature_cased=m.get("signature_cased", "–"),
        **{k: m[k] for k in ("beam", "signature", "chrf_signature",
                             "parameters", "alpha")},
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


def averaging(args):
    """Validate the last weights of a run, their mean, and the best."""
    run = Path(args.run)
    translator = book.load_translator(run)
    pairs = book.corpus_part(
        args.corpus, "val", translator.src, translator.tgt
    )
    paths = book.snapshots(run)
    states = [book.load_tensors(path) for path in paths]
    choices = {
        f"of update {int(paths[-1].stem[-6:]):,}": states[-1],
        f"mean of the last {len(paths)} checkpoints": (
            book.average_weights(states)
        ),
    }
    moving = book.load_tensors(run / "checkpoint.pt")["moving"]
    if moving:
        for weight, average in zip(translator.model.parameters(), moving):
            weight.data = average
        state = translator.model.state_dict()
        choices["moving average"] = {n: w.clone() for n, w in state.items()}
    rows = []
    for name, state in choices.items():
        translator.model.load_state_dict(state)
        facts, _ = book.measure(translator, pairs[:1000], beam=1)
        rows.append(
            {
                "weights": name,
                "val_bleu": facts["bleu"],
                "val_loss": facts["loss"],
            }
        )
    facts = {"commit": args.commit, "run": args.command, "rows": rows}
    write_json(RESULTS / "averaging.json", facts)


def levers(args):
    """Collect validation scores of short runs: FOLDER/NAME-SEED/."""
    rows, earlier = [], []
    if args.add:
        if (before := read("levers")) is None:
            sys.exit("--add to what? results/levers.json is not there")
        if (before["commit"], before["device"]) != (args.commit, args.device):
            sys.exit(
                f"levers.json is of commit {before['commit']}, on "
                f"{before['device']}: runs of another can't be compared"
            )
        earlier = before["runs"]
    for run in sorted(Path(args.folder).iterdir()):
        if not (run / "model.json").exists():
            continue
        lever, _, seed = run.name.rpartition("-")
        log = book.read_log(run)
        scores = [line for line in log if "val_bleu" in line]
        losses = [line for line in log if "loss" in line]
        row = {
            "lever": lever,
            "seed": int(seed),
            "steps": scores[-1]["step"],
            "minutes": round(losses[-1]["seconds"] / 60, 1),
            "val_bleu": round(scores[-1]["val_bleu"], 2),
            "val_loss": round(scores[-1]["val_loss"], 4),
            "options": (run / "options.txt").read_text().strip(),
        }
        translator = book.load_translator(run)
        if translator.both:  # its log has the mean of both directions
            row["val_bleu_of_both"] = row["val_bleu"]
            languages = translator.src, translator.tgt
            pairs = book.corpus_part(args.corpus, "val", *languages)[:1000]
            one, _ = book.measure(translator, pairs, beam=1)
            row["val_bleu"], row["val_loss"] = one["bleu"], one["loss"]
        rows.append(row)
    new = {(row["lever"], row["seed"]) for row in rows}
    rows += [r for r in earlier if (r["lever"], r["seed"]) not in new]
    rows.sort(key=lambda row: (row["lever"], row["seed"]))
    facts = {"commit": args.commit, "device": args.device, "runs": rows}
    write_json(RESULTS / "levers.json", facts)


def means(args):
    """Measure trainings and their means on the validation set."""
    rows = []
    for label, _, folder in (named.rpartition("=") for named in args.runs):
        translator = book.load_translator(Path(folder))
        languages = translator.src, translator.tgt
        pairs = book.corpus_part(args.corpus, "val", *languages)
        row = {"direction": "-".join(languages), "weights": label}
        row |= {"commit": args.commit, "device": args.device}
        for name, beam in (("greedy", 1), ("beam", 4)):
            row[name], _ = book.measure(translator, pairs, beam, args.alpha)
        rows.append(row)
    new = {row["direction"] for row in rows}
    before = (read("means") or {"rows": []})["rows"]
    rows += [row for row in before if row["direction"] not in new]
    rows.sort(key=lambda row: row["direction"])  # within one: as given
    write_json(RESULTS / "means.json", {"rows": rows})


READINGS = [(4, None), (8, None)]
READINGS += [(4, 0.25), *((8, weight) for weight in (0.0, 0.1, 0.25, 0.4))]
KEPT = ("bleu", "bleu_cased", "chrf", "brevity_penalty")


def best_by_hindsight(translator, pairs, beam, alpha):
    """BLEU, were each list's most similar to the reference its first."""
    from sacrebleu.metrics import BLEU

    score = BLEU(lowercase=True, effective_order=True).sentence_score
    sources, references = map(list, zip(*pairs))
    outputs = [
        max(
            (text for _, text in found), key=lambda t, r=r: score(t, [r]).score
        )
        for found, r in zip(translator.best(sources, beam, alpha), references)
    ]
    return round(book.bleu(outputs, references, True).score, 2)


def measured_back(translator, back, corpus, part, row, alpha):
    """What is kept of a translator whose lists another one reads back."""
    pairs = book.corpus_part(corpus, part, translator.src, translator.tgt)
    how = {"back": back, "weight": row["back_weight"]}
    if row["back_weight"] is None:
        how = {}
    found, _ = book.measure(translator, pairs, row["beam"], alpha, **how)
    return {k: found[k] for k in KEPT if k in found}


def settled_reading(args):
    """Measure a model read back, by settings that others have chosen."""
    facts, (name, other) = read("reading"), args.models
    if not facts:
        sys.exit("--settled by what? first the models that choose")
    one, back = (book.load_translator(Path(folder)) for folder in args.models)
    wide, weight = int(args.settled[0]), args.settled[1]
    settings = {"commit": args.commit, "device": args.device}
    rows = [
        {"direction": f"{one.src}-{one.tgt}", "model": Path(name).name}
        | {"back": Path(other).name, "beam": beam, "back_weight": share}
        | settings
        for beam, share in ((4, None), (wide, 0.0), (wide, weight))
    ]
    for row in rows:
        for part in ("val", TEST):
            how = args.corpus, part, row, args.alpha
            row[part] = measured_back(one, back, *how)
    kept = [r for r in facts["rows"] if r["model"] != rows[0]["model"]]
    facts["rows"] = kept + rows
    write_json(RESULTS / "reading.json", facts)


def reading(args):
    """Measure what it brings that two models read each other back."""
    if args.settled:
        return settled_reading(args)
    both = [book.load_translator(Path(folder)) for folder in args.models]
    facts = read("reading") or {"rows": []}
    names = [Path(folder).name for folder in args.models]
    if not args.chosen:  # what others have settled stays
        stay = [row for row in facts["rows"] if row["model"] not in names]
        facts |= {"rows": stay}
    elif not facts["rows"]:
        sys.exit("--chosen by what? first without it, on the validation set")
    part = TEST if args.chosen else "val"
    for folder, translator, back in zip(args.models, both, both[::-1]):
        way = translator.src, translator.tgt
        pairs = book.corpus_part(args.corpus, part, *way)
        if args.chosen:
            beam, weight = args.chosen
            wanted = {(4, None), (int(beam), 0.0), (int(beam), weight)}
            rows = [
                row
                for row in facts["rows"]
                if row["model"] == Path(folder).name
                and (row["beam"], row["back_weight"]) in wanted
            ]
            if len(rows) < len(wanted):
                sys.exit(f"{folder}: validation has no such beam and weight")
        else:
            rows = [
                {"direction": "-".join(way), "model": Path(folder).name}
                | {"beam": beam, "back_weight": weight}
                for beam, weight in READINGS
            ]
            facts["rows"] += rows
        for row in rows:
            how = args.corpus, part, row, args.alpha
            row[part] = measured_back(translator, back, *how)
        if not args.chosen:
            best = best_by_hindsight(translator, pairs, 8, args.alpha)
            facts.setdefault("hindsight", {})["-".join(way)] = best
    settings = {"commit": args.commit, "device": args.device}
    facts |= {f"{part} measured": {**settings, "alpha": args.alpha}}
    write_json(RESULTS / "reading.json", facts)


VOTES = {beam: (None, 0.0, 0.5, 1.0, 2.0) for beam in (4, 8, 16)}


def scores_of(outputs, references, language):
    """BLEU and chrF, as `measure` has them."""
    from sacrebleu.metrics import CHRF

    lower, cased = (
        book.bleu(outputs, references, case, language)
        for case in (True, False)
    )
    chrf = CHRF().corpus_score(outputs, [references])
    found = lower.score, cased.score, chrf.score
    rounded = {name: round(x, 4) for name, x in zip(KEPT, found)}
    return rounded | {"brevity_penalty": round(lower.bp, 4)}


def chances(translator, sources, beam=8):
    """How probable lists of a beam are: medians of their best, of all."""
    lists = translator.hypotheses(sources, beam)
    found = [[math.exp(h.log_prob) for h in one] for one in lists]
    return {
        "beam": beam,
        "best": round(statistics.median(map(max, found)), 5),
        "all": round(statistics.median(map(sum, found)), 5),
    }


def paired_p(outputs, plain, references):
    """How often chance does as much, by sacreBLEU's paired bootstrap."""
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    metrics = {
        "bleu": BLEU(lowercase=True, references=[references]),
        "chrf": CHRF(references=[references]),
    }
    named = [("plain", plain), ("other", outputs)]
    _, scores = PairedTest(named, metrics, None, test_type="bs")()
    found = [scores[name][1].p_value for name in ("BLEU", "chrF2")]
    return dict(zip(metrics, (round(p, 4) for p in found)))


def voting(args):
    """Measure what it brings that the texts of a beam vote."""
    facts = read("voting") or {"rows": [], "chances": {}}
    if args.chosen and not facts["rows"]:
        sys.exit("--chosen by what? first without it, on the validation set")
    settings = VOTES
    if args.chosen:
        beam, power = int(args.chosen[0]), args.chosen[1]
        if power not in VOTES.get(beam, ()):
            sys.exit("--chosen: validation has no such beam and power")
        settings = {4: (None,)}
        settings[beam] = (*settings.get(beam, ()), power)
    rows = {
        (row["model"], row["beam"], row["power"]): row for row in facts["rows"]
    }
    for folder in args.models:
        translator = book.load_translator(Path(folder))
        way, name = (translator.src, translator.tgt), Path(folder).name
        recipe = book.load_description(Path(folder)).get("recipe")
        if recipe is None:
            sys.exit(f"{folder}: a mean of models has no seed of its own")
        parts = ["val"]
        if args.chosen:  # on validation only if it had no part in the choice
            parts = [TEST] if (name, 4, None) in rows else ["val", TEST]
        for part in parts:
            pairs = book.corpus_part(args.corpus, part, *way)
            sources, references = map(list, zip(*pairs))
            if part == "val":
                facts["chances"][name] = chances(translator, sources)
            plain = None
            for beam, powers in settings.items():
                lists = translator.hypotheses(sources, beam, args.alpha)
                for power in powers:
                    if power is None:
                        texts = [found[0].tokens for found in lists]
                        outputs = [*map(translator.join, texts)]
                    else:
                        voted = book.vote(translator, lists, power)
                        outputs = [found[0][1] for found in voted]
                    row = rows.setdefault(
                        (name, beam, power),
                        {"direction": "-".join(way), "model": name}
                        | {"beam": beam, "power": power},
                    )
                    row[part] = scores_of(outputs, references, way[1])
                    if not args.chosen:  # of the model before
                        row.pop(TEST, None)
                    plain = plain or outputs
                    if args.chosen and outputs is not plain:
                        row[part]["p"] = paired_p(outputs, plain, references)
        for (model, *_), row in rows.items():
            if model == name:
                row["seed"] = recipe["seed"]
    facts["rows"] = [*rows.values()]
    settings = {"commit": args.commit, "device": args.device}
    what = f"{TEST if args.chosen else 'val'} measured"
    facts[what] = {**settings, "alpha": args.alpha}
    write_json(RESULTS / "voting.json", facts)


def moses(language, texts):
    """Texts in lower case, with spaces between the words that Moses cuts."""
    from sacremoses import MosesTokenizer

    cut = MosesTokenizer(lang=language).tokenize
    return [cut(text.lower(), return_str=True, escape=False) for text in texts]


def words(args):
    """Score the same translations by two rules of where words end."""
    from sacrebleu import corpus_bleu

    rows = []
    for folder in args.models:
        translator = book.load_translator(Path(folder))
        way = translator.src, translator.tgt
        pairs = book.corpus_part(args.corpus, TEST, *way)
        sources, references = map(list, zip(*pairs))
        outputs = translator.translate(sources, 4, args.alpha)
        usual = book.bleu(outputs, references)
        other = corpus_bleu(
            moses(translator.tgt, outputs),
            [moses(translator.tgt, references)],
            tokenize="none",
            force=True,  # that the texts look cut is meant so
        )
        row = {"direction": "-".join(way), "model": Path(folder).name}
        for name, score in (("13a", usual), ("moses", other)):
            row[name] = {
                "bleu": round(score.score, 2),
                "reference_words": score.ref_len,
            }
        rows.append(row)
    facts = {
        "command": f"python tools/results.py words {' '.join(args.models)} "
        "--corpus multi30k",
        "commit": args.commit,
        "device": args.device,
        "beam": 4,
        "alpha": args.alpha,
        "part": TEST,
        "rows": rows,
    }
    write_json(RESULTS / "words.json", facts)


def heart(args):
    """Measure models on the text that they learned, and on new text.

    Rows of other models, measured before, stay.
    """
    names = {Path(folder).name for folder in args.folders}
    before = (read("by-heart") or {"rows": []})["rows"]
    rows = [row for row in before if row["model"] not in names]
    for folder in args.folders:
        translator = book.load_translator(Path(folder))
        languages = translator.src, translator.tgt
        row = {"model": Path(folder).name, "direction": "-".join(languages)}
        row |= {"commit": args.commit, "device": args.device}
        for part in ("train", "val"):
            row[part], _ = book.measure(
                translator,
                book.corpus_part(args.corpus, part, *languages),
                beam=1,
            )
        rows.append(row)
    rows.sort(key=lambda row: (row["direction"], row["model"]))
    write_json(RESULTS / "by-heart.json", {"rows": rows})


def read(name):
    """Return a result, or None where it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def average(values):
    """Return the mean with one digit, as text."""
    return f"{statistics.fmean(values):.1f}"


def spread(values):
    """Return the mean and, of several values, their standard deviation."""
    if len(values) == 1:
        return average(values)
    return f"{average(values)}±{statistics.stdev(values):.1f}"  # one word


def with_before(result, word):
    """Return word(result); where it went on from others, of all of them."""
    words = [f"{word(stage)}" for stage in stages(result)]
    return words[0] if len(set(words)) == 1 else "+".join(words)


def cores(result):
    """Return how many cores a run had."""
    return {"one": 1, "two": 2}[result["device"].split()[0]]


def multi30k_table(starred=False):
    """Return the lines of the table of trained models.

    The lines of each pair are numbered, as the text speaks of them. Runs of
    one recipe that differ in the seed, and had as many cores, share a line:
    their means, and the deviation of what counts most. (Whether their
    products had 16 bits, and who multiplied, does not part them.) With
    `starred`, minutes have a star where a run had, for a time, but one core.
    """
    lines = [
        "| line | test | val. | cased | chrF | pieces | steps | seed "
        "| cores | min. |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups, sources, lines_of = {}, [], collections.Counter()
    paths = RESULTS.glob("multi30k-*.json")
    for path in sorted(paths, key=lambda path: path.stem):
        r = json.loads(path.read_text("utf-8"))
        recipe = stages(r)[-1]["recipe"] | {"mean": "mean_of" in r}
        apart = "seed", "half", "onednn"  # these do not part them
        same = {k: v for k, v in recipe.items() if k not in apart}
        same["lowercase"] = r.get("lowercase", False)
        before = [stage["commit"] for stage in stages(r)[:-1]]
        key = r["direction"], cores(r), str([before, same, r["config"]])
        file = path.stem.removeprefix("multi30k-")
        groups.setdefault(key, []).append((r, recipe, file))
    for (name, *_), members in groups.items():
        runs, recipe = [r for r, *_ in members], members[0][1]
        test, val = ([r[part] for r in runs] for part in (TEST, "val"))
        both = ", both" if recipe["both"] else ""
        both += ", R-Drop" if recipe["r_drop"] else ""
        both += ", mean" if recipe["mean"] else ""
        width = runs[0]["config"]["d_model"]
        both += {128: "", 256: ", wide"}.get(width, f", width {width}")
        small = "lowercase" in runs[0]  # no text of its own has capitals
        both += ", small letters" if small else ""
        cased, chrf = (
            "–" if small else average([t[name] for t in test])
            for name in ("bleu_cased", "chrf")
        )
        seeds = {s["seed"] for r in runs for s in stages(r)}
        seeds = sorted(seeds)
        if len(seeds) > 1 and seeds == [*range(seeds[0], seeds[-1] + 1)]:
            seeds = [f"{seeds[0]}–{seeds[-1]}"]
        seeds = ", ".join(map(str, seeds))
        [machines] = {with_before(r, cores) for r in runs}
        minutes = round(
            statistics.fmean(
                sum(stage["minutes"] for stage in stages(r)) for r in runs
            )
        )
        steps = [sum(s["steps"] for s in link) for link in links(runs[0])]
        steps = "+".join(f"{number / 1000:g}" for number in steps)
        if recipe["mean"]:  # of many trainings: there is no room for all
            machines = "+".join(sorted({*machines.split("+")}, reverse=True))
        devices = " ".join(s["device"] for r in runs for s in stages(r))
        if starred and "one" in devices.split():
            minutes = f"{minutes}*"
        pieces = f"{runs[0]['config']['src_vocab'] / 1000:g}"
        own = [commits_of(r) for r in runs]
        own = [names[:1] if len({*names}) == 1 else names for names in own]
        own = ["+".join(f"`{name}`" for name in names) for names in own]
        lines_of[name] += 1
        files = ", ".join(f"`{file}`" for *_, file in members)
        own = " and ".join(dict.fromkeys(own))
        sources.append(f"* {name} {lines_of[name]}: {files} ({own})")
        lines.append(
            f"| {name} {lines_of[name]}{both} | "
            f"{spread([t['bleu'] for t in test])} | "
            f"{average([v['bleu'] for v in val])} | "
            f"{cased} | {chrf} | {pieces} | {steps} | {seeds} | {machines} | "
            f"{minutes} |"
        )
    lines += [
        "",
        "<details><summary>The files and the commits of each line</summary>",
        "",
        "In `results/`; `multi30k-` before a name and `.json` after it are",
        "left out here.",
        "",
    ]
    for source in sources:
        lines += textwrap.wrap(
            source, 76, break_on_hyphens=False, subsequent_indent="  "
        )
    return [*lines, "", "</details>"]


IN_SHORT = {  # the README's lines, by their numbers in the book: {line: how}
    "de-en 1": "`--preset laptop --steps 16000`; seed 2: `model-de-en`",
    "de-en 2": "that, then on text made by models: `model-de-en-more`",
    "en-de 1": "`--preset laptop`",
    "en-de 3": "the recipe of Wu et al. (2021), from the pairs alone",
    "en-de 9": "that, further, then on text made by models: `model-en-de`",
    "en-de 10": "from random weights, on text made by models",
    "en-de 12": "the same, twice as wide",
    "en-fr 3": "the recipe of Wu et al. (2021), from the pairs alone; "
    "seed 2: `model-en-fr`",
    "en-fr 5": "that, then on text made by models: `model-en-fr-more`",
    "en-fr 6": "from random weights, on text made by models, twice as wide",
    "fr-en 1": "`--preset laptop --steps 14000`: `model-fr-en`",
}


def multi30k_in_short():
    """Return the lines that the README tells of, and how they were made."""
    found = {}
    for line in multi30k_table(starred=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0].partition(",")[0]] = cells
    lines = ["| line | how | BLEU | on validation | seeds | minutes |"]
    lines.append("|---|---|---|---|---|---|")
    for name, how in IN_SHORT.items():
        _, test, val, *_, seeds, _, minutes = found[name]
        row = name, how, f"**{test}**", val, seeds, minutes
        lines.append(f"| {' | '.join(row)} |")
    return lines


def levers_table():
    """Return the lines of the table of levers, runs of one lever joined."""
    facts = read("levers")
    if facts is None:
        return ["Not measured yet."]
    lines = [
        "| run | BLEU, validation | loss | minutes |",
        "|---|---|---|---|",
    ]
    runs = {}
    for row in facts["runs"]:
        runs.setdefault((row["lever"], row["options"]), []).append(row)
    base = next(rows for (name, _), rows in runs.items() if name == "base")
    mean = sum(r["val_bleu"] for r in base) / len(base)

    def place(item):
        return (item[0][0] != "base", item[0][0])

    for (_, options), rows in sorted(runs.items(), key=place):
        scores = " / ".join(f"{r['val_bleu']:.1f}" for r in rows)
        loss = " / ".join(f"{r['val_loss']:.2f}" for r in rows)
        minutes = " / ".join(f"{r['minutes']:.0f}" for r in rows)
        change = sum(r["val_bleu"] for r in rows) / len(rows) - mean
        what = "the baseline"
        if rows is not base:
            what, scores = f"`{options}`", f"{scores} ({change:+.1f})"
        lines.append(f"| {what} | {scores} | {loss} | {minutes} |")
    return lines


def expect_table():
    """Return the lines of what to expect after how many minutes."""
    lines = ["| minutes | updates | validation BLEU |", "|---|---|---|"]
    result = read(EXPECTED)
    for limit in (5, 15, 30, 60):
        step, minutes, score = min(
            result["curve"], key=lambda row, m=limit: abs(row[1] - m)
        )
        lines.append(f"| {minutes:.0f} | {step:,} | {score:.1f} |")
    return lines


def averaging_table():
    """Return the lines of the table of averaged weights."""
    lines = ["| weights | BLEU | loss |", "|---|---|---|"]
    for row in read("averaging")["rows"]:
        score, loss = row["val_bleu"], row["val_loss"]
        lines.append(f"| {row['weights']} | {score:.2f} | {loss:.3f} |")
    return lines


def means_table():
    """Return the lines of the table of trainings and their means."""
    lines = [
        "| pair | weights | greedy | beam | chrF | loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in (read("means") or {"rows": []})["rows"]:
        greedy, beam = row["greedy"], row["beam"]
        lines.append(
            f"| {row['direction']} | {row['weights']} | {greedy['bleu']:.1f} "
            f"| {beam['bleu']:.1f} | {beam['chrf']:.1f} | {beam['loss']:.3f} |"
        )
    return lines


def reading_table():
    """Return the lines of what reading back brings."""
    lines = [
        "| model | beam | λ | val. | chrF | test | chrF |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (read("reading") or {"rows": []})["rows"]:
        weight = row["back_weight"]
        name = row["model"].removeprefix("model-")
        cells = [name, row["beam"], weight or "–"]
        if weight == 0:
            cells[2] = "0, by length"
        for part in ("val", TEST):
            found = row.get(part)
            for name in ("bleu", "chrf"):
                cells.append(f"{found[name]:.1f}" if found else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def voting_table():
    """Return the lines of how votes fared on the validation set."""
    rows = (read("voting") or {"rows": []})["rows"]
    cells = {}
    for row in rows:
        if (RESULTS / row["model"]).exists():  # these had a part in the choice
            key = row["beam"], row["power"]
            found = cells.setdefault(key, {})
            if row["direction"] in found:
                sys.exit(f"voting.json: two models of {row['direction']}")
            found[row["direction"]] = row["val"]
    pairs = sorted(next(iter(cells.values()), {}))
    lines = [
        f"| beam | τ | {' | '.join(f'{pair} | chrF' for pair in pairs)} |",
        "|---" * (2 + 2 * len(pairs)) + "|",
    ]
    for (beam, power), found in cells.items():
        scores = [
            f"{found[pair][name]:.1f}"
            for pair in pairs
            for name in ("bleu", "chrf")
        ]
        power = "–" if power is None else f"{power:g}"
        lines.append(f"| {beam} | {power} | {' | '.join(scores)} |")
    return lines


def voted_rows():
    """Return [(a model's rows by vote and of the plain beam of four), …]"""
    rows = (read("voting") or {"rows": []})["rows"]
    plain = {
        row["model"]: row
        for row in rows
        if (row["beam"], row["power"]) == (4, None)
    }
    return [
        (row, plain[row["model"]])
        for row in rows
        if TEST in row and row["power"] is not None
    ]


def voted_table():
    """Return the lines of what was chosen of the votes, on the test set."""
    lines = [
        "| pair | seed | val. | voted | test | voted | p | chrF | voted | p |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {}
    for pair in voted_rows():
        groups.setdefault(pair[0]["direction"], []).append(pair)
    for direction, found in sorted(groups.items()):
        for row, plain in sorted(found, key=lambda pair: pair[0]["seed"]):
            lines.append(
                f"| {direction} | {row['seed']} "
                f"| {plain['val']['bleu']:.1f} | {row['val']['bleu']:.1f} "
                f"| {plain[TEST]['bleu']:.1f} | **{row[TEST]['bleu']:.1f}** "
                f"| {row[TEST]['p']['bleu']:.3f} "
                f"| {plain[TEST]['chrf']:.1f} | {row[TEST]['chrf']:.1f} "
                f"| {row[TEST]['p']['chrf']:.3f} |"
            )
        if len(found) > 1:
            cells = [
                summary([pair[i][part][name] for pair in found])
                for part, name, summary in (
                    ("val", "bleu", spread),
                    (TEST, "bleu", spread),
                    (TEST, "chrf", average),  # the line has an end
                )
                for i in (1, 0)
            ]
            scores, others = " | ".join(cells[:4]), " | ".join(cells[4:])
            lines.append(f"| {direction} | all | {scores} | | {others} | |")
    return lines


def words_table():
    """Return the lines of what the rule of words does to BLEU."""
    lines = [
        "| model | BLEU, 13a | words | BLEU, Moses | words |",
        "|---|---|---|---|---|",
    ]
    for row in (read("words") or {"rows": []})["rows"]:
        cells = [row["model"].removeprefix("model-")]
        for rule in ("13a", "moses"):
            cells.append(f"{row[rule]['bleu']:.1f}")
            cells.append(f"{row[rule]['reference_words']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def heart_table():
    """Return the lines of what models know by heart."""
    lines = [
        "| model | loss, seen text | new text | BLEU, seen text | new text |",
        "|---|---|---|---|---|",
    ]
    for row in read("by-heart")["rows"]:
        cells = [
            f"{row[part][name]:{digits}}"
            for name, digits in (("loss", ".2f"), ("bleu", ".1f"))
            for part in ("train", "val")
        ]
        lines.append(f"| `{row['model']}` | {' | '.join(cells)} |")
    return lines


MACHINES = {  # --name: what its processor has besides its name
    None: "",
    "epyc-zen3": " (Zen 3)",
    "epyc-zen5": " (Zen 5)",
    "xeon": "",
    "xeon-amx": " with AMX",
}


def speed_table(names=tuple(MACHINES), aimed=False):
    """Return the lines of what the benchmarks reached, by machine.

    `aimed`: only the rows that have an aim.
    """
    import run

    cells, aims, machines = {}, {}, []  # cells: {(what, machine): text}
    for name in names:
        units = MACHINES[name]
        parts = {
            part: read(Path(run.file_of(part, name)).stem) or {"rows": []}
            for part in ("training", "decoding_peers")
        }
        if not parts["training"]["rows"]:
            continue
        cpu = parts["training"]["machine"]["cpu"]
        machine = re.sub(r"\(R\)| Processor", "", cpu) + units
        machines.append(machine)
        for what, found, aim in run.aims(parts):
            aims[what] = "" if aim is None else f"{aim:g}"
            if found:
                middle, least, most = found
                text = f"**{middle:.2f}** ({least:.2f} to {most:.2f})"
                cells[what, machine] = text
        copies = [
            f"{row['seconds']:.1f}"
            for row in parts["training"]["rows"]
            if row["setting"] == "copy"
        ]
        what = "copy task, start to end, seeds 0 to 4, seconds"
        aims[what] = "10"
        cells[what, machine] = ", ".join(copies)
    if not machines:
        return ["Not measured yet."]
    lines = [f"| what | {' | '.join(machines)} | aim |"]
    lines.append("|---" * (len(machines) + 2) + "|")
    for what, aim in aims.items():
        found = [cells.get((what, machine), "") for machine in machines]
        if any(found) and (aim or not aimed):
            lines.append(f"| {what} | {' | '.join(found)} | {aim} |")
    return lines


def fewer_bits_table():
    """Return the lines of what 8 and 16 bits bring in decoding, by machine."""
    import run

    lines = [
        "| two cores | bits | tiny | tiny, beam | base | base, beam |",
        "|---|---|---|---|---|---|",
    ]
    for name, units in MACHINES.items():
        facts = read(Path(run.file_of("decoding_peers", name)).stem)
        if facts is None:
            continue
        cpu = facts["machine"]["cpu"]
        machine = re.sub(r"\(R\)| Processor", "", cpu) + units
        for bits, program in ((8, "ours, int8"), (16, "ours, bf16")):
            found = [
                f"{1 / row['ours_over_it'][0]:.2f}"
                for row in facts["rows"]
                if row["program"] == program
            ]
            if found:  # 16 bits are not measured where they take hours
                lines.append(f"| {machine} | {bits} | {' | '.join(found)} |")
    return lines


def gpu_table():
    """Return the lines of how fast a GPU trains, from benchmarks-gpu.json."""
    found = read("benchmarks-gpu") or {"rows": []}
    lines = [
        "| form | ms | tokens/s | of the product rate | over the peer's |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        name = row["form"].replace("peer", "nn.Transformer")
        cells = [f"{name}{', as it is' * (', ' not in name)}"]
        cells += [f"{row['milliseconds']:.1f}"]
        cells += [f"{row['tokens_per_second'][0]:,.0f}"]
        for key, digits in (("share", 3), ("over_peer_likewise", 2)):
            middle, least, most = row[key]
            spread = f" ({least:.{digits}f} to {most:.{digits}f})"
            cells.append(f"**{middle:.{digits}f}**{spread}")
        cells[-1] = "" if "peer" in row["form"] else cells[-1]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def wider_table():
    """Return how models of several widths do after as many updates."""
    wider, step = read("gpu-wider-en-fr")["rows"], 4000
    lines = [
        "| width | text | greedy | with a beam of four |",
        "|---|---|---|---|",
    ]
    for name in WIDE_FR:
        run = read(name)
        [bleu] = [at[2] for at in run["curve"] if at[0] == step]
        what = f"{run['config']['d_model']}, seed {run['seed']}"
        lines.append(f"| {what} | 87,000 pairs | {bleu:.1f} | – |")
    for run in wider:
        options = run["command"].split()
        width = options[options.index("--d-model") + 1]
        pairs = "145,000" if "en-fr-more4" in options else "87,000"
        [bleu] = [at[1] for at in run["curve"] if at[0] == step]
        beam = run["val"]["bleu"]
        lines.append(f"| {width} | {pairs} pairs | {bleu:.1f} | {beam:.1f} |")
    return lines


def claim_lines(facts, verdict=""):
    """Return a claim and what was found, as lines of a list."""
    text = f"Section {facts['section']}: {facts['claim']}. {verdict}"
    found = facts["found"]
    symbol = found.startswith("d_k")  # which stays small
    text += f"{found if symbol else found[0].upper() + found[1:]}."
    return textwrap.wrap(
        f"* {text}", 76, subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def claims_table():
    """Return how many claims have which verdict, and those that failed."""
    record = read("claims").values()
    lines = ["| verdict | claims |", "|---|---|"]
    for verdict in book.VERDICTS:
        count = sum(facts["verdict"] == verdict for facts in record)
        lines.append(f"| {verdict} | {count} |")
    for verdict in ("not reproduced", "undecided"):
        lines += ["", f"{verdict.capitalize()}:", ""]
        for facts in record:
            if facts["verdict"] == verdict:
                lines += claim_lines(facts)
    return lines


def long_claims():
    """Return what the long forms of the claims found."""
    lines = []
    for facts in read("claims").values():
        if facts["settings"]:
            verdict = f"*{facts['verdict'].capitalize()}*: "
            lines += claim_lines(facts, verdict)
    return lines


LENGTHS = {  # levers at full length: {column: result}
    "the preset": "multi30k-en-de",
    "10,000 pieces": "pieces-en-de",
    "diversified": "diversified",
}


def full_length_table():
    """Return the lines that compare curves, update by update."""
    results = {name: read(file) for name, file in LENGTHS.items()}
    results = {name: r for name, r in results.items() if r is not None}
    curves = [{row[0]: row[2] for row in r["curve"]} for r in results.values()]
    rows = {
        f"{step:,}, greedy": [curve[step] for curve in curves]
        for step in (1000, 5000, 10_000, 15_000, 20_000)
    }
    rows["20,000, a beam of four"] = [
        r["val"]["bleu"] for r in results.values()
    ]
    lines = [
        f"| updates | {' | '.join(results)} |",
        "|---" * (1 + len(results)) + "|",
    ]
    for what, scores in rows.items():
        shown = " | ".join(f"{score:.1f}" for score in scores)
        lines.append(f"| {what} | {shown} |")
    return lines


FRENCH = "multi30k-en-fr-tiny"  # three seeds of one recipe
FRENCH = FRENCH, f"{FRENCH}-s1", f"{FRENCH}-s2"
WRITTEN = "multi30k-en-de-tiny-written-by-models"
WRITTEN = WRITTEN, f"{WRITTEN}-s1", f"{WRITTEN}-s2"  # three from one beginning
ANEW = "multi30k-en-de-tiny-written-text"
ANEW = ANEW, f"{ANEW}-s1", f"{ANEW}-s2"  # and three from random weights
WIDE = tuple(f"{ANEW[0]}-wide{seed}" for seed in ("", "-s1", "-s2"))
WIDE_FR = "multi30k-en-fr-written-text-wide"
WIDE_FR = WIDE_FR, f"{WIDE_FR}-s1", f"{WIDE_FR}-s2"
FIRST = "multi30k-en-de", "multi30k-en-de-s1"  # two seeds of the first line
GAINS = [  # (what is changed, the result, that which it is compared with)
    ("10,000 pieces, not 5,000", "pieces-en-de", "multi30k-en-de"),
    ("the same, 4,000 updates fewer", "multi30k-en-fr-10k", "multi30k-en-fr"),
    ("other recipe: third line, not first",
     "multi30k-en-de-tiny", FIRST),
    ("other recipe: third line, not second",
     FRENCH, "multi30k-en-fr-10k"),
    ("10,000 updates more", "multi30k-en-de-longer", "multi30k-en-de"),
    ("15,000 more, dropout 0.3", "dropout-en-de", "pieces-en-de"),
    ("diversified, anew", "diversified", "multi30k-en-de"),
    ("third line, then a falling rate",
     "multi30k-en-de-tiny-on", "multi30k-en-de-tiny"),
    ("third line, then BPE-dropout, plain",
     "multi30k-en-de-tiny-spellings", "multi30k-en-de-tiny"),
    ("the mean of A, B and C (below)",
     "multi30k-en-de-tiny-spellings-mean", "multi30k-en-de-tiny"),
    ("sixth line, then diversified text",
     WRITTEN, "multi30k-en-de-tiny-spellings-mean"),
    ("sixth line, then better models' text",
     "diversified-better-text", "multi30k-en-de-tiny-spellings-mean"),
    ("as the seventh, better models' text",
     ANEW, "multi30k-en-de-tiny-straight"),
    ("tenth line, seed 0, then more text",
     f"{ANEW[0]}-on", ANEW[0]),
    ("tenth line, but a width of 256", WIDE, ANEW),
    ("ninth line once more, seed 0", "diversified-twice", WRITTEN[0]),
    ("the closest of the beam, seed 0", "diversified-closest", WRITTEN[0]),
    ("first line, then diversified text",
     "multi30k-de-en-written-by-models", "multi30k-de-en-2"),
    ("both directions first, then one",
     "multi30k-en-fr-tiny-both", FRENCH),
    ("third line, then diversified text",
     "multi30k-en-fr-written-by-models", "multi30k-en-fr-tiny-s2"),
    ("third line, but a width of 256",
     "real-pairs-wide-en-fr", FRENCH),
    ("fifth line, but anew, a width of 256",
     WIDE_FR, "multi30k-en-fr-written-by-models"),
    ("sixth line, then text anew, by it too",
     "diversified-once-more-en-fr", WIDE_FR[0]),
    ("sixth line, then the real pairs alone",
     "real-at-last", WIDE_FR[0]),
]  # fmt: skip


def gain(after, before, part, name):
    """Return how much more some runs have than others, in the mean."""
    if not all(part in run for run in after + before):
        return "–"  # not measured
    means = [
        statistics.fmean(run[part][name] for run in runs)
        for runs in (after, before)
    ]
    return f"{round(means[0] - means[1], 1) + 0.0:+.1f}"  # +0.0, never -0.0


def gains_table():
    """Return the lines that say what each lever brings at full length."""

    def runs(names):
        names = [names] if isinstance(names, str) else names
        return [*map(read, names)]

    found = [(what, runs(new), runs(old)) for what, new, old in GAINS]
    rows = read("reading")["rows"]
    beams = {(r["model"], r["beam"], r["back_weight"]): r for r in rows}
    for (model, beam, weight), row in beams.items():
        if weight and TEST in row:  # what validation chose
            plain = beams[model, 4, None]
            more = ", -more" if model.endswith("-more") else ""
            what = f"read back, a beam of {beam}{more}"
            found.append((what, [row], [plain]))
    for row, plain in voted_rows():
        if (RESULTS / row["model"]).exists():
            what = f"voting, a beam of {row['beam']}"
            found.append((what, [row], [plain]))
    lines = [
        "| pair | what | BLEU, val. | test | chrF, val. | test |",
        "|---|---|---|---|---|---|",
    ]
    for what, after, before in found:
        gains = [
            gain(after, before, part, name)
            for name in ("bleu", "chrf")
            for part in ("val", TEST)
        ]
        cells = " | ".join([after[0]["direction"], what, *gains])
        lines.append(f"| {cells} |")
    return lines


EXPECTED = "multi30k-en-de"
TABLES = {
    "multi30k": multi30k_table,
    "multi30k in short": multi30k_in_short,
    "expect": expect_table,
    "averaging": averaging_table,
    "means": means_table,
    "by heart": heart_table,
    "reading": reading_table,
    "voting": voting_table,
    "voted": voted_table,
    "words": words_table,
    "gains": gains_table,
    "levers": levers_table,
    "full length": full_length_table,
    "wider": wider_table,
    "speed": speed_table,
    "speed on a GPU": gpu_table,
    "fewer bits": fewer_bits_table,
    "speed in short": partial(speed_table, (None, "epyc-zen5"), aimed=True),
    "claims": claims_table,
    "long claims": long_claims,
}


def with_tables(text, prefix):
    """Return a file's text with the lines between its markers made anew."""
    marks = r"<!-- (?:end of )?(.+?)(?:: tools/results\.py)? -->"
    found = re.findall(f"^{prefix}{marks}$", text, re.M)
    for name in found:
        if name not in TABLES or found.count(name) != 2:
            sys.exit(f"markers of the table {name!r}: a misspelt or lost one")
    for name, table in TABLES.items():
        if name not in found:
            continue
        lines = "\n".join((prefix + line).rstrip() for line in table())
        start, end = (
            f"{prefix}<!-- {name}: tools/results.py -->",
            f"{prefix}<!-- end of {name} -->",
        )
        pattern = re.escape(start) + r"\n.*?" + re.escape(end)
        blank = prefix.rstrip()
        fresh = f"{start}\n{blank}\n{lines}\n{blank}\n{end}"
        text, count = re.subn(pattern, lambda _, f=fresh: f, text, flags=re.S)
        if count != 1:
            sys.exit(f"markers of the table {name!r} stand in a wrong order")
    return text


def tables(write):
    """Write the tables, or return the files in which they are stale."""
    stale = []
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in PLACES
    }
    for name in TABLES:
        if not any(f"<!-- {name}: tools" in text for text in texts.values()):
            sys.exit(f"no markers of the table {name!r} in {', '.join(texts)}")
    for name, prefix in PLACES.items():
        path, old = ROOT / name, texts[name]
        new = with_tables(old, prefix)
        if new != old:
            stale.append(name)
            if write:
                path.write_text(new, encoding="utf-8")
    return stale


def main():
    """Run one of the commands above."""
    parser = argparse.ArgumentParser(usage=__doc__)
    commands = parser.add_subparsers(dest="name_of_command", required=True)
    sub = commands.add_parser("record")
    sub.add_argument("name")
    sub.add_argument("run")
    for option in ("corpus", "command", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--reverse", action="store_true")
    sub.add_argument("--beam", type=int, default=4)
    sub.add_argument("--alpha", type=float, default=0.6)
    sub.add_argument("--note", default="")
    sub.add_argument("--no-test", action="store_true")  # not chosen: no need
    sub.add_argument("--before", metavar="NAME")
    sub.add_argument("--of", nargs="+", metavar="NAME")
    sub = commands.add_parser("publish")
    for argument in ("name", "run", "folder"):
        sub.add_argument(argument)
    sub.add_argument("--corpus", required=True)
    sub.add_argument("--log", metavar="FILE")
    sub = commands.add_parser("means")
    sub.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--alpha", type=float, default=1.5)
    sub = commands.add_parser("averaging")
    sub.add_argument("run")
    for option in ("corpus", "command", "commit"):
        sub.add_argument(f"--{option}", required=True)
    sub = commands.add_parser("levers")
    sub.add_argument("folder")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--add", action="store_true")
    sub = commands.add_parser("heart")
    sub.add_argument("folders", nargs="+", metavar="FOLDER")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub = commands.add_parser("reading")
    sub.add_argument("models", nargs=2, metavar="MODEL")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--alpha", type=float, default=1.5)
    sub.add_argument("--chosen", nargs=2, type=float)
    sub.add_argument("--settled", nargs=2, type=float)
    sub = commands.add_parser("voting")
    sub.add_argument("models", nargs="+", metavar="MODEL")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--alpha", type=float, default=1.5)
    sub.add_argument("--chosen", nargs=2, type=float)
    sub = commands.add_parser("words")
    sub.add_argument("models", nargs="+", metavar="MODEL")
    for option in ("corpus", "commit", "device"):
        sub.add_argument(f"--{option}", required=True)
    sub.add_argument("--alpha", type=float, default=1.5)
    commands.add_parser("tables")
    commands.add_parser("check")
    args = parser.parse_args()
    name = args.name_of_command
    if name not in ("tables", "check"):
        globals()[name](args)
    elif name == "tables":
        print("written:", *tables(write=True))
    elif stale := tables(write=False):
        sys.exit(f"stale tables in {', '.join(stale)}: make tables")


if __name__ == "__main__":
    main()
