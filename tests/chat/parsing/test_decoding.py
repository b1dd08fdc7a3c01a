import json
from time import thread_time

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer as RustTokenizer, decoders, models

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


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a token for each byte, as SentencePiece has them. Id 256 is "a"."""
    folder = tmp_path_factory.mktemp("bytes")
    names = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "\u2581b": 257}
    rust = RustTokenizer(models.BPE(names, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(folder)


def test_a_broken_character_behind_a_whole_one_takes_nothing_back(byte_tokens: Tokenizer) -> None:
    decoder, smile = decoder_of(byte_tokens), "\U0001f600"
    pieces = [decoder.feed(id_) for id_ in (256, *smile.encode(), 0xF0, 257)]
    assert pieces == ["a", "", "", "", smile, "", "\ufffd b"]


@given(
    ids=st.lists(st.sampled_from((*"\U0001f600é".encode(), 0xFF, 0x41, 256, 257)), max_size=80),
    cut=st.integers(0, 80),
)
def test_any_bytes_have_one_text_however_they_come(
    byte_tokens: Tokenizer, ids: list[int], cut: int
) -> None:
    together, single = decoder_of(byte_tokens), decoder_of(byte_tokens)
    joined = together.feed_all(ids[:cut]) + together.feed_all(ids[cut:]) + together.finish()
    assert joined == "".join(map(single.feed, ids)) + single.finish()


@given(
    texts=st.lists(st.sampled_from((b"\xff", b"\x98", "\U0001f600".encode(), b" a")), max_size=99)
)
def test_bytes_that_are_no_characters_have_the_text_of_all_at_once(
    tokenizer: Tokenizer, texts: list[bytes]
) -> None:
    names = {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.rust.get_vocab_size())}
    ids = [names[bytes([byte])] for byte in b"".join(texts)]
    decoder = decoder_of(tokenizer)
    joined = "".join(map(decoder.feed, ids)) + decoder.finish()
    assert joined == tokenizer.rust.decode(ids)


@pytest.mark.parametrize("byte", [0xFF, 0xF0])
def test_bytes_without_an_end_are_passed_on_in_linear_time(
    byte_tokens: Tokenizer, byte: int
) -> None:
    decoder, begun = decoder_of(byte_tokens), thread_time()
    pieces = [decoder.feed(byte) for _ in range(20_000)]
    assert len("".join(pieces)) > 19_900
    assert thread_time() - begun < 10  # half a minute if each were decoded with all before it


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
