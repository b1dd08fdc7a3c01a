import pytest
from hypothesis import example, given, strategies as st

from rollmesh.chat import Tokenizer
from rollmesh.chat.parsing import StopStrings, decoder_of


@given(text=st.text(max_size=60))
def test_pieces_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    decoder = decoder_of(tokenizer)
    joined = "".join(decoder.feed(int(id_)) for id_ in ids) + decoder.finish()
    assert joined == tokenizer.rust.decode(ids.tolist())


@given(text=st.text(max_size=60))
@example(text="<|im_end|>\n<|im_start|>user\n a\u0301 \U0001f600")
def test_the_quick_way_to_tokenise_gives_the_same_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text).tolist() == tokenizer.rust.encode(text).ids


@given(ids=st.lists(st.integers(0, 350), max_size=40))
def test_any_ids_decode_as_they_do_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = decoder_of(tokenizer)
    pieces = [decoder.feed(id_) for id_ in ids]
    whole = tokenizer.rust.decode(ids, skip_special_tokens=True)
    joined = "".join(pieces) + decoder.finish()
    assert joined.replace("\ufffd", "") == whole.replace("\ufffd", "")


@given(text=st.text(max_size=60), cut=st.integers(0, 60), split=st.integers(0, 3))
@example(text="<|im_end|>a\u0301 \U0001f600", cut=4, split=2)
def test_ids_that_come_together_give_the_text_of_single_ones(
    tokenizer: Tokenizer, text: str, cut: int, split: int
) -> None:
    ids = tokenizer.encode(text).tolist()[: cut or None]  # the cut may part a character
    together, single = decoder_of(tokenizer), decoder_of(tokenizer)
    head, tail = ids[: len(ids) - split], ids[len(ids) - split :]
    joined = together.feed_all(head) + together.feed_all(tail) + together.finish()
    assert joined == "".join(map(single.feed, ids)) + single.finish()


def test_a_character_split_over_tokens_is_never_shown_broken(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) > 1  # else this shows nothing
    decoder = decoder_of(tokenizer)
    assert [decoder.feed(int(id_)) for id_ in ids] == [*[""] * (len(ids) - 1), "\U0001f600"]


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@example(text="ab", stops=["ab", "b"])
@example(text="xab", stops=["b", "ab"])
def test_stop_strings_cut_where_the_whole_text_would(text: str, stops: list[str]) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    matcher, emitted, stopped = StopStrings(stops), "", False
    for char in text:
        piece, stopped = matcher.feed(char)
        emitted += piece
        if stopped:
            break
    if not stopped:
        emitted += matcher.finish()
    # The stop string that is complete first wins, at the earliest place it can be cut.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(found)
    if stopped:
        first = min(ends)
        assert emitted == text[: min(text.find(s) for s in stops if s in text[:first])]
    else:
        assert emitted == text


def test_the_first_of_several_stop_strings_in_one_piece_ends_the_text() -> None:
    assert StopStrings(["."]).feed("One. Two. Three.") == ("One", True)


@pytest.mark.parametrize("pieces", [["abcd"], ["ab", "cd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_the_stop_string_that_is_complete_first_wins_in_any_pieces(pieces: list[str]) -> None:
    for kept, text in ((False, "a"), (True, "abc")):
        matcher = StopStrings(["abcd", "bc"], kept=kept)
        emitted = ""
        for piece in pieces:
            certain, stopped = matcher.feed(piece)
            emitted += certain
            if stopped:
                break
        assert (emitted, matcher.found) == (text, "bc")


def test_a_stop_string_that_is_kept_ends_the_text() -> None:
    for kept, text in ((False, "a b"), (True, "a b stop")):
        matcher = StopStrings([" stop"], kept=kept)
        pieces = [matcher.feed(piece) for piece in ("a b st", "op, and more")]
        assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == (text, True)
