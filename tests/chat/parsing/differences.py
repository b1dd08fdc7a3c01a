"""Ways in which our parsers and vLLM's read an answer differently, each a predicate."""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

from rollmesh.chat.parsing import FORMATS, PythonicFormat, TaggedFormat
from tests.chat.parsing.readings import SPELLED, Calls, Pair, Reading, marks_of
from tests.chat.parsing.writers import WRITERS


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain(value, *map(_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain(*map(_strings, value))


def _whole(calls: Calls) -> bool:
    return all(name in {"f", "g"} and isinstance(arguments, dict) for name, arguments in calls)


def _within(few: Calls, many: Calls) -> bool:
    """Whether `few` are `many` without some, in order."""
    rest = iter(many)
    return all(call in rest for call in few)


def _offered(call: tuple[str, Any]) -> bool:
    return call[0] in {"f", "g"}


def _text_around(pair: Pair) -> bool:
    same = pair.ours.calls == pair.theirs.calls
    more = pair.ours.content.startswith(pair.theirs.content)
    return bool(pair.ours.calls) and same and more and not pair.ours.malformed


def _dropped(pair: Pair) -> bool:
    behind = pair.ours.content.removeprefix(pair.theirs.content)
    more = behind != pair.ours.content or not pair.theirs.content
    marks = marks_of(pair)
    call = any(mark in behind for mark in (*marks, '{"name"'))
    return pair.ours.calls == pair.theirs.calls and more and call


def _names(pair: Pair) -> bool:
    known = [call for call in pair.theirs.calls if _offered(call)]
    return pair.ours.malformed and known != pair.theirs.calls and _within(pair.ours.calls, known)


def _no_object(pair: Pair) -> bool:
    known = [call for call in pair.theirs.calls if _offered(call)]
    good = [call for call in known if isinstance(call[1], dict)]
    return pair.ours.malformed and good != known and _within(pair.ours.calls, good)


def _broken_off(pair: Pair) -> bool:
    whole = [call for call in pair.ours.calls if isinstance(call[1], dict)]
    theirs = [call for call in pair.theirs.calls if isinstance(call[1], dict)]
    return pair.ours.malformed and whole != pair.ours.calls and _within(theirs, whole)


def _all_or_nothing(pair: Pair) -> bool:
    calls = pair.ours.calls
    return pair.nothing and bool(calls) and _whole(calls)


def _unclosed(pair: Pair) -> bool:
    fewer = _within(pair.theirs.calls, pair.ours.calls) and pair.theirs.calls != pair.ours.calls
    return pair.ours.malformed and fewer and _whole(pair.ours.calls)


def _mark_cut(pair: Pair) -> bool:
    behind = pair.ours.content.removeprefix(pair.theirs.content).strip()
    marks = marks_of(pair)
    cut = any(mark.startswith(behind) for mark in marks) and pair.text.endswith(behind)
    return pair.ours.calls == pair.theirs.calls and bool(behind) and cut


def _mark_in_name(pair: Pair) -> bool:
    marks = marks_of(pair)
    return any(mark in name for mark in marks for name, _ in pair.theirs.calls)


def _lead_lost(pair: Pair) -> bool:
    less = pair.theirs.content in pair.text and pair.ours.content == pair.text.strip()
    return not pair.theirs.calls and not pair.ours.calls and less and pair.ours.malformed


def _first_array(pair: Pair) -> bool:
    calls = pair.theirs.calls
    first = calls == pair.ours.calls[: len(calls)] and pair.text.count("[TOOL_CALLS]") > 1
    return pair.writer == "mistral array" and first


def _mark_in_string(pair: Pair) -> bool:
    writer = WRITERS[pair.writer]
    inside = any(writer.tag in text for _, given in pair.ours.calls for text in _strings(given))
    whole = _whole(pair.ours.calls) and not pair.ours.malformed
    return inside and whole and pair.ours.calls == pair.output.meant


def _lines(pair: Pair) -> bool:
    fewer = _within(pair.theirs.calls, pair.ours.calls) and pair.theirs.calls != pair.ours.calls
    spread = re.search(r"\{[^\uff5c]*\n[^\uff5c]*\}|(?:json|sep\uff5c>)\s*\n\s*\n?\{|\r", pair.text)
    both = "deepseek" in pair.writer and bool(spread)
    return fewer and both and _whole(pair.ours.calls) and not pair.ours.malformed


def _swallowed(pair: Pair) -> bool:
    broken = [given for _, given in pair.theirs.calls if isinstance(given, str)]
    whole = pair.ours.malformed and _whole(pair.ours.calls)
    if pair.writer in SPELLED:
        shown = any(mark in pair.ours.content for mark in marks_of(pair))
        two = len(re.findall(r"call:\w*\{|<atem:invoke name", pair.text)) > len(pair.theirs.calls)
        return whole and shown and two and not _within(pair.ours.calls, pair.theirs.calls)
    return whole and any(re.search(r"[}\]]<[|\uff5c]", given) for given in broken)


def _merged(pair: Pair) -> bool:
    given = [arguments for _, arguments in pair.ours.calls if isinstance(arguments, dict)]
    wider = [one for _, one in pair.theirs.calls if one not in given and isinstance(one, dict)]
    spread = any(one.items() <= more.items() for more in wider for one in given if one)
    return pair.ours.malformed and spread and _whole(pair.ours.calls)


def _marks_around(pair: Pair) -> bool:
    text = pair.text
    for mark in getattr(FORMATS.get(WRITERS[pair.writer].format), "around", ()):
        text = text.replace(mark, "")
    return pair.nothing and not pair.ours.calls and pair.ours.content == text.strip()


def _no_section(pair: Pair) -> bool:
    before = WRITERS[pair.writer].before
    whole = _whole(pair.ours.calls) and not pair.ours.malformed
    return pair.nothing and bool(pair.ours.calls) and before not in pair.text and whole


def _no_key(pair: Pair) -> bool:
    bare = re.search(r'\{"name": "[fg]"\}', pair.text)
    return pair.nothing and bool(bare) and pair.ours.calls == [("g", {})]


def _completed(pair: Pair) -> bool:
    more = _within(pair.ours.calls, pair.theirs.calls) and pair.theirs.calls != pair.ours.calls
    marks = marks_of(pair)
    shown = any(mark in pair.ours.content for mark in marks)
    return pair.ours.malformed and more and shown and _whole(pair.theirs.calls)


def _in_prose(pair: Pair) -> bool:
    more = _within(pair.ours.calls, pair.theirs.calls) and pair.ours.calls != pair.theirs.calls
    shown = re.search(r'\{\s*"name"', pair.ours.content)
    return "llama3" in pair.writer and more and bool(shown) and not pair.theirs.content


def _not_all_a_list(pair: Pair) -> bool:
    format_ = FORMATS.get(WRITERS[pair.writer].format)

    def unmarked(text: str) -> str:
        for mark in marks_of(pair):
            text = text.replace(mark, "")
        return text.strip()

    text = unmarked(pair.text)
    nothing = not pair.theirs.calls and unmarked(pair.theirs.content) == text
    flagged = pair.ours.malformed and unmarked(pair.ours.content) == text
    found = _whole(pair.ours.calls) if pair.ours.calls else flagged
    return isinstance(format_, PythonicFormat) and nothing and found


def _spelling(pair: Pair) -> bool:
    if pair.ours.content != pair.theirs.content or len(pair.ours.calls) != len(pair.theirs.calls):
        return False
    for (name, given), (other, taken) in zip(pair.ours.calls, pair.theirs.calls, strict=True):
        if name != other or not isinstance(given, dict) or not isinstance(taken, dict):
            return False
        if given.keys() != taken.keys():
            return False
    tagged = isinstance(FORMATS.get(WRITERS[pair.writer].format), TaggedFormat)
    return tagged or pair.writer in SPELLED


def _line_break(pair: Pair) -> bool:
    same = pair.ours.calls == pair.theirs.calls
    return (
        same
        and pair.ours.content.split() != []
        and "".join(pair.ours.content.split()) == "".join(pair.theirs.content.split())
    )


def _header_cut(pair: Pair) -> bool:
    nothing = pair.ours == Reading("", [])
    return pair.writer == "muse_glimmer" and nothing and "to=".startswith(pair.theirs.content[:3])


def _first_list(pair: Pair) -> bool:
    calls = pair.theirs.calls
    first = calls == pair.ours.calls[: len(calls)]
    return pair.writer == "lfm2" and first and pair.text.count("<|tool_call_start|>") > 1


CLASSES: dict[str, tuple[Callable[[Pair], bool], str]] = {
    "part of a list": (
        _not_all_a_list,
        "vLLM reads a list of Python calls only if it is the complete answer and every "
        "element is valid; otherwise everything is text, without some of the delimiters. Here"
        " each complete call of a list at the beginning, or after its delimiter, is a call; "
        "the rest is text, flagged if it stands in the list.",
    ),
    "text around calls": (
        _text_around,
        "The calls are equal, but vLLM drops text before, between or after them. The text was"
        " sampled, may have been streamed, and is part of the next prompt, so it stays.",
    ),
    "cut inside a delimiter": (
        _mark_cut,
        "The answer ends with a part of a delimiter, which vLLM drops. It cannot be known "
        "what it would have become, so it stays text.",
    ),
    "delimiters around calls": (
        _marks_around,
        "No call is complete. vLLM returns the complete answer; these parsers omit the "
        "delimiters of the section, which had to be recognised before it was known that no "
        "call is complete.",
    ),
    "text lost with the calls": (
        _lead_lost,
        "No call is complete and the answer is text for both, but vLLM omits the text before "
        "the call, its delimiter, or its body. Here all of it is returned and flagged.",
    ),
    "spelling of values": (
        _spelling,
        "Tagged values that are not JSON (`+5`, `007`) or do not fit the schema (`4.0` for an"
        " array or a boolean): vLLM converts them as Python does, also to types that the "
        "schema does not allow. Here a value that does not fit stays the sampled text; of "
        "Python's words, `True`, `False` and `None` are read where the schema allows their "
        "values.",
    ),
    "line break between texts": (
        _line_break,
        "vLLM puts a line break between the text before the calls and the text after them. "
        "Here the text is what was sampled.",
    ),
    "cut inside a header": (
        _header_cut,
        "The answer ends within the header of a message, which vLLM returns as text.",
    ),
    "second list": (
        _first_list,
        "vLLM reads the first of two delimited lists of LFM2 and drops the text between them.",
    ),
    "delimiter inside a string": (
        _mark_in_string,
        "An argument contains text that looks like a delimiter. vLLM's regular expressions "
        "end the call there; these parsers know where strings end.",
    ),
    "delimiter inside a name": (
        _mark_in_name,
        "An opening delimiter was sampled twice, or a closing one is missing. vLLM makes it "
        "part of the tool's name. Here it is text, flagged, and the call after it counts.",
    ),
    "no key for arguments": (
        _no_key,
        'A call like `{"name": "g"}`, for a tool without parameters, is a call with `{}`.',
    ),
    "no section around calls": (
        _no_section,
        "The delimiter that begins the section of calls is missing or broken, but each call "
        "has its own delimiters.",
    ),
    "whitespace between delimiters": (
        _lines,
        "vLLM's expressions for DeepSeek do not match arguments over several lines, "
        "whitespace that differs from the template's, or CRLF. The call is lost, from the "
        "text too.",
    ),
    "broken call dropped": (
        _dropped,
        "An incomplete call is neither in vLLM's calls nor in its text. Here it stays text, "
        "so the agent sees what the model did.",
    ),
    "unknown or missing name": (
        _names,
        "vLLM passes on calls of tools that were not offered or have no name. Here they stay "
        "text and are flagged, so agents receive only calls of tools they have.",
    ),
    "next call swallowed": (
        _swallowed,
        "A call lacks its closing delimiter. vLLM takes the next call into its arguments, "
        "which are then not JSON, or drops it. Here it ends where the next begins, and is "
        "flagged.",
    ),
    "arguments that are not an object": (
        _no_object,
        "The API requires an object. vLLM passes on null, numbers, lists, or text that is not"
        " JSON. Here it is text, flagged.",
    ),
    "broken inside the arguments": (
        _broken_off,
        "The call had begun to stream when it broke, so it stays a call with what was "
        "sampled, and is flagged.",
    ),
    "one call spoils all": (
        _all_or_nothing,
        "One call is incomplete and vLLM returns everything as text. The others are complete,"
        " so here they are calls.",
    ),
    "delimiter missing or doubled": (
        _unclosed,
        "A call is complete except for a missing closing delimiter or a surplus opening one, "
        "and vLLM loses it, from the text too. Here it is a call, flagged.",
    ),
    "second array": (
        _first_array,
        "vLLM reads the first of two `[TOOL_CALLS]` arrays.",
    ),
    "JSON in prose": (
        _in_prose,
        "A Llama answer that begins with prose. vLLM takes any JSON in it for calls, but only"
        " without streaming; when it streams it does as these parsers do: calls stand at the "
        "beginning or after `<|python_tag|>`. Other JSON is part of the prose, and has been "
        "streamed as such.",
    ),
    "completed": (
        _completed,
        "A call breaks off and vLLM passes on the arguments it found, often `{}`, so the "
        "agent would run a call that the model did not write. Here it is text, flagged.",
    ),
    "arguments of two calls": (
        _merged,
        "A call lacks its end and vLLM puts the next call's arguments into it. Here it is "
        "text, flagged, and the next one counts.",
    ),
}
"""Differences in the order in which they are looked for: the predicate, and what happens."""
