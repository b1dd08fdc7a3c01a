"""The error of input that the library refuses."""


class InvalidInputError(ValueError):
    """A message, a tool or a parser's name is malformed, or not possible with this model.

    The message of the error names the field, the problem and the remedy.
    """

    def __init__(self, field: str, problem: str) -> None:
        """Makes an error of `field`, such as `messages[0].role`."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
