"""LangGraph's ReAct agent on `langchain-openai`. Arguments: form, name, questions."""

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def calculator(a: float, b: float = 1.0, note: str = "") -> float:
    """Multiplies."""
    return a * b


def main(form: str, name: str, *questions: str) -> None:
    model = ChatOpenAI(model="policy", streaming=form == "streamed")
    agent = create_react_agent(model, [calculator], prompt="You compute.", name=name or None)
    messages: list[Any] = []
    answers: list[str] = []
    for question in questions:
        messages.append(("user", question))
        messages = agent.invoke({"messages": messages})["messages"]
        answers.append(messages[-1].content)
    sys.stdout.write(json.dumps(answers))


main(*sys.argv[1:])
