from rollmesh.gateway.answer import Answer
from rollmesh.gateway.text import IncrementalDecoder
from rollmesh.gateway.tokenizer import Tokenizer


def new_answer(tokenizer: Tokenizer, *stops: str) -> Answer:
    return Answer(
        IncrementalDecoder(tokenizer),
        stops,
        parser=None,
        reasoning=None,
        new_call_id=lambda: "call",
    )


def test_what_comes_together_leaves_together(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The answer is 42.").tolist()
    assert len(ids) > 1  # else this shows nothing
    assert new_answer(tokenizer).feed(ids) == ["The answer is 42."]


def test_a_stop_string_cuts_at_its_token_however_the_ids_came(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The answer is 42. I am not sure.").tolist()
    whole, single = new_answer(tokenizer, "42"), new_answer(tokenizer, "42")
    together = whole.feed(ids)
    apart = [delta for id_ in ids for delta in single.feed([id_])]
    assert together == ["The answer is "]
    assert "".join(map(str, apart)) == "The answer is "
    assert whole.stopped_at == single.stopped_at
