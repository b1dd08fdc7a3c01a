"""One question to one model. Arguments: client (openai, litellm or langchain), model, question."""

import json
import os
import sys
from collections.abc import Callable


def ask_openai(model: str, question: str) -> str:
    from openai import OpenAI  # each client takes seconds to import

    stream = OpenAI().chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def ask_litellm(model: str, question: str) -> str:
    import litellm

    answer = litellm.completion(
        model=f"openai/{model}",
        messages=[{"role": "user", "content": question}],
        api_base=os.environ["OPENAI_BASE_URL"],
    )
    return str(answer.choices[0].message.content)


def ask_langchain(model: str, question: str) -> str:
    from langchain_openai import ChatOpenAI

    return str(ChatOpenAI(model=model).invoke(question).content)


CLIENTS: dict[str, Callable[[str, str], str]] = {
    "openai": ask_openai,
    "litellm": ask_litellm,
    "langchain": ask_langchain,
}
sys.stdout.write(json.dumps(CLIENTS[sys.argv[1]](*sys.argv[2:])))
