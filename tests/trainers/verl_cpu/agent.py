"""The agent of the runs of verl's trainer. Imported by verl's processes only."""

from typing import Any

import aiohttp

from rollmesh.client import Session

_TURNS = 2
_TOKENS = 12
_FAILS_AT, _FAILURES = 2, 2
_failed: list[str] = []


async def run(prompt: dict[str, Any], session: Session) -> dict[str, float]:
    """Talks for two turns. Rewards the share of lower-case letters in the answers.

    The first two agents of the second step fail.
    """
    if prompt["global_steps"] == _FAILS_AT and len(_failed) < _FAILURES:
        _failed.append(session.session_id)
        raise RuntimeError(f"agent {len(_failed)} has lost its tools")
    messages = list(prompt["raw_prompt"])
    headers = {"Authorization": f"Bearer {session.api_key}"}
    said = ""
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(_TURNS):
            body = {"model": "policy", "messages": messages, "max_tokens": _TOKENS}
            async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {answer}")
            message = answer["choices"][0]["message"]
            said += message["content"] or ""
            messages += [message, {"role": "user", "content": "again"}]
    letters = sum("a" <= letter <= "z" for letter in said)
    return {"reward": letters / max(len(said), 1), "letters": float(letters)}
