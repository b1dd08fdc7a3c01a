"""Writes the tables of roles and of routes into docs/security.md, between its two marks.

python -m scripts.pages.security
"""

from pathlib import Path

from rollmesh.runtime.access import MEANING, OPEN, TABLE, Role
from rollmesh.sidecar import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
_BEGIN, _END = "<!-- roles: generated -->\n", "<!-- roles: end -->\n"


def page(text: str) -> str:
    """Returns the page with the tables as they are in the code.

    Args:
        text: The page as it is.
    """
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{_roles()}\n{_methods()}\n{_routes()}\n{_END}{after}"


def _roles() -> str:
    rows = "".join(f"| `{role}` | {MEANING[role]} |\n" for role in Role)
    return f"| role | what it is |\n|---|---|\n{rows}"


def _methods() -> str:
    head = f"| method | {' | '.join(Role)} |\n|---|{':-:|' * len(Role)}\n"
    return head + "".join(_row(method, roles) for method, roles in TABLE.items())


def _routes() -> str:
    head = "| route of the sidecar | opens with |\n|---|---|\n"
    return head + "".join(f"| `{name}` | {opens} |\n" for name, opens in ROUTES.items())


def _row(method: str, roles: frozenset[Role]) -> str:
    service, _, name = method[1:].rpartition("/")
    marks = " | ".join("✓" if role in roles else "" for role in Role)
    stranger = ", anyone" if method in OPEN else ""
    return f"| `{service.rpartition('.')[2]}.{name}`{stranger} | {marks} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
