"""Seals on reasoning that agents carry: they prove that an echo was sampled.

A seal names the answer and the text, and is signed with the session's key. Sidecars share nothing
for it, it holds after a restart, and no key of another session makes one. The holder of the key
could make one too, but nothing is trained for it: a seal only tells equal answers of the session
apart.
"""

import base64
import hashlib
import hmac
from functools import lru_cache

from prometheus_client import Counter

ECHOED_REASONING = Counter(
    "rollmesh_sidecar_echoed_reasoning_total",
    "Reasoning that agents sent back: sealed as it was sampled, or not.",
    ["sealed"],
)
_SEALED, _UNSEALED = (ECHOED_REASONING.labels(said) for said in ("yes", "no"))
_SIGNATURES = 16_384
"""Signatures that are kept: agents send the complete conversation with each request."""
_DIGEST_BYTES, _MAC_BYTES = 16, 18
_MAX_SEAL_CHARS = 512


def seal(session_key: str, answer_id: str, text: str) -> str:
    """Returns the seal of an answer's reasoning: `<answer id>.<digest>.<signature>`."""
    signed = f"{answer_id}.{_digest(text)}"
    return f"{signed}.{_sign(session_key, signed)}"


def sealed_answer(session_key: str, given: str, text: str) -> str:
    """Returns the id of the answer that reasoning is of, and counts it.

    Args:
        session_key: Key of the session.
        given: The seal. The id is empty if it does not hold.
        text: The reasoning. Empty if the agent keeps only the seal.
    """
    signed, _, signature = given.rpartition(".")
    is_sealed = (
        bool(signed)
        and len(given) <= _MAX_SEAL_CHARS
        and given.isascii()
        and hmac.compare_digest(signature, _sign(session_key, signed))
        and (not text or signed.rpartition(".")[2] == _digest(text))
    )
    (_SEALED if is_sealed else _UNSEALED).inc()
    return given.split(".", 1)[0] if is_sealed else ""


def _digest(text: str) -> str:
    data = text.encode(errors="surrogatepass")
    return _text(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest())


@lru_cache(_SIGNATURES)
def _sign(session_key: str, signed: str) -> str:
    mac = hmac.digest(session_key.encode(), b"reasoning " + signed.encode(), hashlib.sha256)
    return _text(mac[:_MAC_BYTES])


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
