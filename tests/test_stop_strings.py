"""Stop strings against decoding after every token, and against transformers."""

from itertools import count, takewhile

import fakes
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout import EngineConfig, RequestError, RolloutEngine, SamplingParams, StopStrings

SMALL = {"max_rows": 3, "page_tokens": 4, "prefill_tokens": 9}


def fast(model, decoder, pre_tokenizer=None):
    backend = Tokenizer(model)
    backend.decoder = decoder
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level():
    """Like GPT-2: 256 bytes, and tokens of whole characters, parts, or both."""
    letters = dict(zip(range(256), bytes_to_letters(), strict=True))
    joined = ["ab", " a", "é", "€!", "abc", "!\n"]
    parts = [b"\xc3", b"a\xc3", b"\xa9b", b"\x82\xac", b"\xac a", b"\xa9\xc3"]
    tokens = [letters[byte] for byte in range(256)]
    for text in [*(word.encode() for word in joined), *parts]:
        tokens.append("".join(letters[byte] for byte in text))
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(tokens))}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return fast(models.BPE(vocabulary, []), decoders.ByteLevel(), split)


def bytes_to_letters():
    """GPT-2's letter for each byte: the byte if printable, else a character from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def byte_fallback():
    """Like Llama 2: words with a leading space, and bytes for all other text."""
    tokens = ["<unk>", "▁", "▁a", "▁ab", "a", "b", "c", "ab", "é", "!", "\n", "▁▁", "bc!", *"def"]
    tokens += [f"<0x{byte:02X}>" for byte in (0x0A, 0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF)]
    vocabulary = {word: index for index, word in enumerate(tokens)}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    return fast(model, decoder, pre_tokenizers.Metaspace("▁", prepend_scheme="first"))


def word_pieces():
    """Like BERT: tokens that continue a word are marked; other tokens start a word."""
    tokens = [
        "[UNK]",
        "a",
        "b",
        "ab",
        "##a",
        "##b",
        "##ab",
        "!",
        ".",
        "##!",
        *map("##{}".format, "cdef"),
    ]
    vocabulary = {word: index for index, word in enumerate(tokens)}
    return fast(models.WordPiece(vocabulary, unk_token="[UNK]"), decoders.WordPiece(cleanup=False))


TOKENIZERS = {
    "characters": tiny.tokenizer(),
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "word pieces": word_pieces(),
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def decoder_of(tokenizer):
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def stop_at(tokenizer, *strings):
    return StopStrings(strings, decoder_of(tokenizer), len(tokenizer))


# --- the matcher


def length_of(stop, ids):
    """Number of tokens up to the stop, by our matcher; all tokens without one."""
    tokens = np.array(ids, np.int64)
    for length in range(1, len(ids) + 1):
        if stop.may_end(tokens[length - 1 : length])[0] and stop.ends(tokens[:length]):
            return length
    return len(ids)


def naive_length_of(strings, decode, ids):
    """The same, by decoding the completion after every token."""
    for length in range(1, len(ids) + 1):
        if any(string in decode(ids[:length]) for string in strings):
            return length
    return len(ids)


def texts_of(decode, ids):
    """Substrings of the decoded ids, without broken characters."""
    text = decode(ids).replace("\ufffd", "") or "?"
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 7))
    return places.map(lambda place: text[place[0] : sum(place)])


@each_tokenizer
@settings(deadline=None)
@given(data=st.data())
def test_a_row_ends_where_its_decoded_completion_has_the_string(name, data):
    tokenizer = TOKENIZERS[name]
    decode, size = decoder_of(tokenizer), len(tokenizer)
    few = [token for token in range(size) if size < 100 or token > 240 or token in b"ab \xc3\xa9"]
    ids = data.draw(st.lists(st.sampled_from([*few, size + 3]), min_size=1, max_size=24))
    strings = data.draw(st.lists(texts_of(decode, ids), min_size=1, max_size=3))
    stop = StopStrings(strings, decode, size)
    wanted = naive_length_of(strings, decode, ids)
    assert length_of(stop, ids) == wanted
    # If a row goes on past the stop, it ends at the next token that completes a string.
    later = [n for n in range(wanted + 1, len(ids) + 1) if completes(strings, decode, ids[:n])]
    ends = [n for n in range(wanted + 1, len(ids) + 1) if stop.ends(np.array(ids[:n]))]
    assert ends == later
    assert stop.may_end(np.array([ids[n - 1] for n in ends], np.int64)).all()


def completes(strings, decode, ids):
    """Whether the last token completes one of the strings."""
    text, before = decode(ids), len(decode(ids[:-1]).rstrip("\ufffd"))
    ends = (
        place + len(s) for s in strings for place in range(len(text)) if text[place:].startswith(s)
    )
    return any(end > before for end in ends)


def test_few_tokens_of_prose_are_looked_at():
    """Many tokens contain a string's last letter, but few can end the string."""
    tokens = ["man", "an", "n", "human", "Human", "answer", "no", "van", "\n\nHu", "mania"]
    stop = StopStrings(["\n\nHuman:", "Human"], lambda ids: "".join(tokens[i] for i in ids), 10)
    last_tokens = [tokens[token] for token in range(10) if stop.may_end(np.array([token]))[0]]
    assert last_tokens == ["man", "an", "n", "Human", "answer", "no", "mania"]


@pytest.mark.parametrize("strings", [[], "ab", [""], ["a", 3], ["\ufffd"], 5, None], ids=repr)
def test_strings_that_say_nothing_are_refused(strings):
    with pytest.raises(RequestError, match=r"stop_strings=.*: must be"):
        StopStrings(strings, "".join, 3)


# --- through the engine


@torch.no_grad()
def by_transformers(model, tokenizer, prompt, strings, max_new_tokens):
    """`model.generate` on one prompt, greedily."""
    model.eval()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stop_strings=list(strings),
        tokenizer=tokenizer,
    )
    return output[0, len(prompt) :].tolist()


def strings_of(prompt, text):
    """Substrings of a completion to stop at, and one that is not in it.

    transformers also searches the prompt and treats the first token specially: both are left out.
    """
    pieces = [piece for piece in text[4:].split("\ufffd") if piece] or ["?"]
    wanted = pieces[len(pieces) // 2][:3], pieces[-1][-4:]
    return [*(piece for piece in wanted if piece not in prompt[-4:] + text[:4]), "abbaab"]


@each_tokenizer
@pytest.mark.parametrize("num_slots", [1, 2])
def test_rows_end_where_transformers_ends_them(name, num_slots):
    tokenizer = TOKENIZERS[name]
    decode, size = decoder_of(tokenizer), len(tokenizer)
    model = tiny.build(vocab_size=size, eos_token_id=None)
    prompts = [[token % size for token in prompt] for prompt in tiny.prompts(6, seed=2)]
    plain = SamplingParams(max_new_tokens=24, temperature=0)
    with RolloutEngine(model, EngineConfig(**SMALL, num_slots=num_slots)) as engine:
        texts = [decode(c.token_ids) for c in engine.generate(prompts, plain)]
        strings = [strings_of(decode(p), text) for p, text in zip(prompts, texts, strict=True)]
        sampling = [
            SamplingParams(max_new_tokens=24, temperature=0, stop_strings=stop_at(tokenizer, *each))
            for each in strings
        ]
        completions = engine.generate(prompts, sampling)
    for prompt, each, completion in zip(prompts, strings, completions, strict=True):
        wanted = by_transformers(model, tokenizer, prompt, each, 24)
        assert completion.token_ids == wanted
        stopped = any(string in decode(wanted) for string in each)
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert len(completion.logprobs) == len(wanted)
    assert sum(len(c.token_ids) < 24 for c in completions) >= 3


def test_a_string_that_begins_in_the_prompt_is_none():
    """As in vLLM. transformers would stop after the first token."""
    tokenizer, model, prompt = tiny.tokenizer(), tiny.build(), [9, 10, 11]
    sampling = SamplingParams(max_new_tokens=9, temperature=0)
    with RolloutEngine(model, EngineConfig(**SMALL)) as engine:
        (plain,) = engine.generate([prompt], sampling)
        string = tokenizer.decode([11, plain.token_ids[0]])
        sampling = SamplingParams(
            max_new_tokens=9, temperature=0, stop_strings=stop_at(tokenizer, string)
        )
        (completion,) = engine.generate([prompt], sampling)
    assert completion.token_ids == plain.token_ids
    assert by_transformers(model, tokenizer, prompt, [string], 9) == plain.token_ids[:1]


def characters(ids):
    """One character per token."""
    return "".join(chr(40 + token) for token in ids)


def ended(prompts, plain, min_new_tokens=0):
    """Rows of 30 tokens, most of which stop at a substring of their own, and their expected ids."""
    for index, (prompt, ids) in enumerate(zip(prompts, plain, strict=True)):
        text, first = characters(ids), 5 + index + min_new_tokens
        string = text[first : first + 1 + index % 3]
        ends = (text.find(string, place) + len(string) for place in range(30))
        ends = [*takewhile(lambda end: end <= 30, (end for end in ends if end >= len(string)))]
        end = next((end for end in ends if end >= min_new_tokens), 30)
        stop = StopStrings([string], characters, tiny.VOCAB) if index % 4 else None
        sampling = SamplingParams(
            max_new_tokens=30, min_new_tokens=min_new_tokens, stop_strings=stop
        )
        yield prompt, sampling, ids[:end] if stop else ids


@pytest.mark.parametrize("min_new_tokens", [0, 14])
def test_preempted_rows_end_where_they_would_and_overruns_are_dropped(min_new_tokens):
    prompts, model = tiny.prompts(8, seed=3), tiny.build()
    roomy = EngineConfig(**fakes.ROOM)
    with fakes.with_history_model(RolloutEngine(model, roomy)) as engine:
        plain = engine.generate(prompts, SamplingParams(max_new_tokens=30))
        rows = list(ended(prompts, [c.token_ids for c in plain], min_new_tokens))
        _, sampling, wanted = zip(*rows, strict=True)
        assert [c.token_ids for c in engine.generate(prompts, sampling)] == list(wanted)
        page_bytes = engine.worker.kv_cache.layout.page_bytes
    assert sum(len(ids) < 30 for ids in wanted) >= 4
    for engine in fakes.short_of_pages(model, page_bytes):
        completions = engine.generate(prompts, sampling)
        assert engine.stats.preemptions > 0
        assert [c.token_ids for c in completions] == list(wanted)
        assert [c.logprobs for c in completions] == [
            c.logprobs[: len(ids)] for c, ids in zip(plain, wanted, strict=True)
        ]


def test_only_rows_that_drew_a_last_token_are_decoded():
    decoded = []

    def decode(ids):
        decoded.append(ids)
        return characters(ids)

    stop = StopStrings([characters([9, 10])], decode, tiny.VOCAB)
    decoded.clear()
    sampling = SamplingParams(max_new_tokens=20, stop_strings=stop)
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        completions = engine.generate(tiny.prompts(6), sampling)
    drawn = [token for completion in completions for token in completion.token_ids]
    assert len(decoded) <= 2 * drawn.count(10)
    assert all(len(ids) <= 3 and 10 in ids for ids in decoded)
