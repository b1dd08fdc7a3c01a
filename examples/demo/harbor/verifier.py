"""Judges the attempt on the standard input, for the question in the arguments. Run by tasks' tests.

Needs only the standard library.
"""

import json
import sys

from examples.demo.tasks import Task, reward


def main() -> None:
    """Prints Harbor's rewards."""
    a, operation, b = sys.argv[1:]
    attempt = json.load(sys.stdin)
    earned = reward(Task(int(a), operation, int(b)), attempt["calls"], attempt["answer"])
    print(json.dumps({"reward": earned}))


if __name__ == "__main__":
    main()
