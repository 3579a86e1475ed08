"""Beginnings of rows, and the pages that hold them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.scheduler.pages import PrefixIndex, page_keys

tokens = st.lists(st.integers(0, 3), max_size=24)


@given(tokens, tokens, st.integers(1, 6))
def test_keys_are_equal_as_far_as_tokens_are(left, right, page_tokens):
    keys = [list(page_keys(np.array(row, np.int64), page_tokens)) for row in (left, right)]
    assert [len(found) for found in keys] == [len(row) // page_tokens for row in (left, right)]
    for index, (mine, theirs) in enumerate(zip(*keys, strict=False)):
        stop = (index + 1) * page_tokens
        assert (mine == theirs) == (left[:stop] == right[:stop])


@given(st.lists(tokens, max_size=8), tokens, st.integers(1, 4))
def test_the_longest_known_beginning_is_found(rows, wanted, page_tokens):
    index, held = PrefixIndex(), {}
    for number, row in enumerate(rows):
        pages = [100 * number + place for place in range(len(row) // page_tokens)]
        index.add(page_keys(np.array(row, np.int64), page_tokens), pages)
        held.update({page: row[: (place + 1) * page_tokens] for place, page in enumerate(pages)})
    found = index.match(page_keys(np.array(wanted, np.int64), page_tokens))
    known = [stop for row in rows for stop in range(len(row) + 1) if row[:stop] == wanted[:stop]]
    longest = max(known, default=0) // page_tokens
    assert len(found) == longest
    for place, page in enumerate(found):
        assert held[page] == wanted[: (place + 1) * page_tokens]


def test_a_page_that_is_forgotten_is_not_found_and_ends_the_match():
    index, row = PrefixIndex(), np.arange(6)
    index.add(page_keys(row, 2), [7, 8, 9])
    index.forget(8)
    assert index.match(page_keys(row, 2)) == [7]
    assert 9 in index
    index.clear()
    assert index.match(page_keys(row, 2)) == []
    assert 9 not in index
