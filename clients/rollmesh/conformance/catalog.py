"""All checks, in the order in which they run."""

from rollmesh.conformance.chat import (
    answers as chat_answers,
    branches as chat_branches,
    echoes as chat_echoes,
    refusals as chat_refusals,
    streams as chat_streams,
    tokens as chat_tokens,
)
from rollmesh.conformance.checks import Check
from rollmesh.conformance.http import HTTP, OBSERVED
from rollmesh.conformance.messages import (
    answers as messages_answers,
    echoes as messages_echoes,
    refusals as messages_refusals,
    streams as messages_streams,
)
from rollmesh.conformance.responses import (
    answers as responses_answers,
    echoes as responses_echoes,
    refusals as responses_refusals,
    streams as responses_streams,
)
from rollmesh.conformance.training.records import RECORDS

_FAMILIES = (
    HTTP,
    chat_answers.ANSWERS,
    chat_streams.STREAMS,
    chat_echoes.ECHOES,
    chat_echoes.IMAGES,
    chat_branches.BRANCHES,
    chat_refusals.RETRIES,
    chat_tokens.TOKENS,
    chat_refusals.REFUSALS,
    responses_answers.ANSWERS,
    responses_streams.STREAMS,
    responses_echoes.ECHOES,
    responses_echoes.IMAGES,
    responses_refusals.RETRIES,
    responses_refusals.REFUSALS,
    messages_answers.ANSWERS,
    messages_streams.STREAMS,
    messages_echoes.ECHOES,
    messages_echoes.IMAGES,
    messages_refusals.RETRIES,
    messages_refusals.REFUSALS,
    RECORDS,
    OBSERVED,  # looks back at the others
)
CHECKS: tuple[Check, ...] = tuple(check for family in _FAMILIES for check in family.checks)
"""Every check. Their names are unique."""
