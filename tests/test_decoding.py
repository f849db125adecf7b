"""Greedy decoding: what is written, when it stops, and what it costs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, UNK


def plain_greedy(model, row, extra):
    """One sentence, no batch, no tricks: the definition."""
    tgt = [BOS]
    with torch.no_grad():
        for _ in range(len(row) + extra):
            logits = model(torch.tensor([row]), torch.tensor([tgt]))[0, -1]
            logits[[PAD, BOS, UNK]] = -torch.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            tgt.append(word)
    return tgt[1:]


def lively_model(seed):
    """Untrained, with weights so large that its outputs vary."""
    torch.manual_seed(seed)
    model = book.tiny_model()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0, 0.5)
    with torch.no_grad():
        model.tgt_embedding.weight[EOS] *= 2  # some sentences end early
    return model.eval()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_a_batch_is_decoded_like_each_sentence_alone(seed, lengths):
    model = lively_model(seed)
    rows = [torch.randint(4, 14, (n,)).tolist() for n in lengths]
    together = book.greedy(model, book.pad(rows), extra=6)
    assert together == [plain_greedy(model, row, 6) for row in rows]


def scripted_model(lengths):
    """A model that writes sentence i with `lengths[i]` words, then EOS."""
    model = book.tiny_model().eval()
    calls = []

    def decode(tgt, memory, mask):
        calls.append(len(tgt))
        states = torch.zeros(*tgt.shape, 32)
        left = memory[:, 0, 0]  # the length that this row shall have
        states[:, -1, 0] = torch.where(tgt.size(1) > left, 1.0, -1.0)
        return states

    def encode(src):
        memory = torch.tensor(lengths).float()[:, None, None]
        return memory, src[:, None, None] != PAD

    with torch.no_grad():
        model.tgt_embedding.weight.zero_()
        model.tgt_embedding.weight[EOS, 0] = 1.0
        model.tgt_embedding.weight[7, 0] = -1.0
    model.decode, model.encode = decode, encode
    return model, calls


def test_each_sentence_stops_at_its_own_end():
    model, _ = scripted_model([3, 0, 5])
    outputs = book.greedy(model, torch.full((3, 4), 9))
    assert outputs == [[7] * 3, [], [7] * 5]


def test_no_step_more_than_needed_and_ended_sentences_leave():
    model, calls = scripted_model([3, 0, 5])
    book.greedy(model, torch.full((3, 4), 9))
    assert calls == [3, 2, 2, 2, 1, 1]  # five words and the end: six steps


def test_an_endless_sentence_stops_at_source_plus_fifty():
    model, calls = scripted_model([999, 999])
    src = torch.tensor([[9, 9, 9, EOS], [9, EOS, PAD, PAD]])
    outputs = book.greedy(model, src)
    assert [len(output) for output in outputs] == [54, 52]
    assert len(calls) == 54


def test_special_tokens_are_never_written():
    for seed in range(5):
        outputs = book.greedy(lively_model(seed), torch.full((4, 3), 9), 8)
        assert not {PAD, BOS, UNK, EOS} & {t for o in outputs for t in o}


def test_decoding_needs_evaluation_mode_and_sees_to_it():
    torch.manual_seed(0)
    model = book.tiny_model(dropout=0.5)
    src = torch.randint(4, 14, (8, 6))
    model.eval()
    expected = book.greedy(model, src, 5)
    model.train()
    assert book.greedy(model, src, 5) == expected
    assert model.training  # as the caller left it


def test_evaluation_mode_is_put_back_after_an_error():
    model = book.tiny_model()
    try:
        with book.evaluating(model):
            assert not model.training
            raise KeyError
    except KeyError:
        pass
    assert model.training


def test_an_empty_batch_gives_nothing():
    assert book.greedy(book.tiny_model(), torch.zeros(0, 3).long()) == []
