from pathlib import Path

import pytest

from tests.chat.constraints.grammars import Compiler


@pytest.fixture(scope="session", params=[True, False], ids=["marks special", "marks text"])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    folder: Path = tmp_path_factory.mktemp("marks")
    return Compiler(folder, special=request.param)
