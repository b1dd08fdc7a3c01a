"""Streams between services."""

from collections.abc import AsyncIterator

import pytest

from rollmesh.runtime.errors import StaleVersionError
from rollmesh.runtime.rpc.channels import drained_on_refusal


async def test_a_refusal_takes_the_rest_of_the_stream_first() -> None:
    taken: list[int] = []

    async def requests() -> AsyncIterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    async def refuse(stream: AsyncIterator[int]) -> None:
        async with drained_on_refusal(stream):
            await anext(stream)
            raise StaleVersionError("old")

    with pytest.raises(StaleVersionError):
        await refuse(requests())
    assert taken == [0, 1, 2, 3, 4]
