"""The gallery of bugs: each is refused by its check, and leaves no trace."""

import contextlib
import dataclasses
import inspect
import math

import pytest

import annotated_transformer as book

GALLERY = list(book.CHECKS).index("only_dropout_tells_the_modes_apart")


def everything():
    """All that the book defines, down to the methods of its classes."""
    things = {name: id(thing) for name, thing in vars(book).items()}
    for name, thing in vars(book).items():
        if inspect.isclass(thing) and thing.__module__ == book.__name__:
            for key, value in vars(thing).items():
                things[f"{name}.{key}"] = id(value)
    return things


@pytest.mark.parametrize("name", book.BUGS)
def test_the_check_refuses_the_bug(name):
    """An assertion fails; a bug that only crashes would need no check."""
    assert book.BUGS[name].caught()


@pytest.mark.parametrize("place", ["attenton", "Batch.raed", "Bach.read"])
def test_a_bug_of_nothing_is_refused_and_not_kept(place):
    with pytest.raises(book.InputError, match=f"there is no '{place}'"):
        book.bug(place, "attention_equals_torch")(lambda: None)
    assert "<lambda>" not in book.BUGS


def test_a_bug_is_refused_from_another_seed():
    for bug in book.BUGS.values():
        run_check = book.CHECKS[bug.caught_by]
        book.run_seeded(run_check, 1)
        with bug.planted(), pytest.raises(AssertionError):
            book.run_seeded(run_check, 1)


@pytest.mark.parametrize("name", book.BUGS)
def test_a_bug_leaves_the_book_as_it_was(name):
    bug, before = book.BUGS[name], everything()
    with bug.planted():
        during = everything()
    assert everything() == before
    changed = {key for key in before if during[key] != before[key]}
    assert changed == {bug.place} and during.keys() == before.keys()
    with pytest.raises(KeyError), bug.planted():
        raise KeyError
    assert everything() == before


def test_there_are_many_and_most_are_caught_by_the_chapters_own_checks():
    chapters = list(book.CHECKS)[:GALLERY]
    own = [b for b in book.BUGS.values() if b.caught_by in chapters]
    assert len(book.BUGS) >= 30
    assert len(own) > 0.7 * len(book.BUGS)


def test_each_check_of_the_gallery_catches_a_bug_of_it():
    needed = {bug.caught_by for bug in book.BUGS.values()}
    start = inspect.getsource(book).index("## A gallery of bugs")
    end = inspect.getsource(book).index("## Saved models")
    text = inspect.getsource(book)[start:end]
    here = [name for name in book.CHECKS if f"\ndef {name}(" in text]
    assert len(here) == 7 and set(here) <= needed


def test_a_bug_that_is_none_is_caught_by_nothing():
    none = book.Bug("attention", book.attention, "attention_equals_torch")
    assert not none.caught()


def test_a_crash_does_not_count_as_caught():
    crash = book.Bug("attention", lambda: 0, "attention_equals_torch")
    with pytest.raises(TypeError):
        crash.caught()


def test_a_property_stays_one():
    batch = book.Batch(None, book.pad([[book.BOS, 4, book.EOS]]))
    with book.BUGS["target_not_shifted"].planted():
        assert batch.read.tolist() == batch.labels.tolist()
    assert batch.read.tolist() == [[book.BOS, 4]]


def test_a_static_method_and_a_class_method_stay_such():
    def forgetful(heads, query, K, V, mask=None, right=book.Cache.look):
        return right(heads, query, K, 0 * V, mask)

    def deaf(cls, model, src, width=1):
        memory, mask = model.encode(src)
        return cls(model, 0 * memory, mask, width)

    for place, wrong in (("Cache.look", forgetful), ("Cache.begin", deaf)):
        assert book.Bug(place, wrong, "writer_changes_nothing").caught()


def test_without_a_bug_the_small_model_learns_to_copy(one_thread):
    loss, perplexity, right = book.symptoms_of_none()
    assert loss < 0.65 and perplexity < 1.25 and right >= 270


def test_a_model_that_sees_its_label_has_a_fine_loss_and_no_use(one_thread):
    before = book.symptoms_of_none()
    loss, _, right, who = book.examine_bug("target_not_shifted")
    assert loss < 1.1 * before[0] and right < 30
    assert who == "labels_are_what_is_read_next"
    assert book.shown_by("target_not_shifted") == "exact match"
    assert book.symptoms_of_none() == before


def test_a_bug_in_use_is_planted_after_training(one_thread):
    loss, _, right, _ = book.examine_bug("all_at_the_first_place")
    assert loss == book.symptoms_of_none()[0] and right < 100
    early = book.BUGS["no_root_of_d_model"]  # which changes the loss
    late = dataclasses.replace(early, in_use=True)
    assert late.symptoms()[0] == loss


def test_training_and_held_out_rows_are_different():
    train, test = book.short_rows()
    assert len(test) == 300 and len(train) > 3000
    seen = {tuple(src) for src, _ in train}
    assert not any(tuple(src) in seen for src, _ in test)
    assert {len(src) for src, _ in test} == {4, 5, 6, 7}


def test_the_table_has_each_bug_once_in_its_group(
    monkeypatch, capsys, one_thread
):
    loss, *_ = book.symptoms_of_none()
    facts = {name: (loss, 1.1, 300, "a check") for name in book.BUGS}
    facts["source_never_read"] = (9.0, 1.1, 300, "a check")
    facts["end_never_trained"] = (loss, 1.1, 200, "nothing")
    monkeypatch.setattr(book, "SYMPTOMS", facts)
    book.gallery_of_bugs()
    groups = capsys.readouterr().out.split("\n\n")
    assert "source never read" in groups[1] and "loss: 1 of" in groups[1]
    assert "end never trained" in groups[2] and "nothing" in groups[2]
    for name in book.BUGS:
        words = f"\n{name.replace('_', ' ')} "
        assert sum(group.count(words) for group in groups) == 1


@pytest.mark.parametrize(
    "name",
    [None, "softmax_over_the_queries", "mask_the_wrong_way_round",
     "heads_cut_across_positions"],
)  # fmt: skip
def test_perplexity_is_spoilt_by_the_padding_beside_a_sequence(name):
    """By one length at a time it is that of the right model, or nearer."""
    test, alike = book.short_rows()[1], {}
    for src, tgt in test:
        alike.setdefault((len(src), len(tgt)), []).append((src, tgt))
    bug, worst = book.BUGS.get(name), 0
    for seed in range(3):  # how much, is a matter of luck
        recipe = dataclasses.replace(book.SMALL_RECIPE, seed=seed)
        with bug.planted() if bug else contextlib.nullcontext():
            model, _ = book.train_small(recipe=recipe)
            together = book.perplexity(model, test)
            total = tokens = 0
            for group in alike.values():
                count = sum(len(tgt) - 1 for _, tgt in group)
                total += count * math.log(book.perplexity(model, group))
                tokens += count
        alone = math.exp(total / tokens)
        worst = max(worst, together)
        if name == "heads_cut_across_positions":
            assert math.log(alone) < math.log(together) / 2
        else:
            assert alone < 1.13 and alone < together + 0.001
    assert (worst > 1.13) is (name is not None)
