import logging
import os
from pathlib import Path

import pytest

from rollmesh.runtime.access import (
    AcceptedTokens,
    PresentedToken,
    Role,
    TokensOfFile,
    digest_line,
    make_tokens,
    token_of,
    write_private,
)
from rollmesh.runtime.config import ConfigError

ONE, OTHER = "a" * 32, "b" * 40


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.runtime.access.tls._LOOK_MS", 0)


def accepted(folder: Path, **tokens: str) -> AcceptedTokens:
    write_private(folder, {role: text.encode() for role, text in tokens.items()})
    return AcceptedTokens(folder)


def test_each_token_shows_the_role_of_its_file(tmp_path: Path) -> None:
    tokens = accepted(tmp_path, engine=f"# old\n{ONE}\n\n", gateway=digest_line(OTHER))
    assert tokens.roles(ONE) == {Role.ENGINE}
    assert tokens.roles(OTHER) == {Role.GATEWAY}
    assert tokens.roles(digest_line(OTHER)) == set()
    assert tokens.roles(ONE[:-1]) == tokens.roles("") == tokens.roles("\udcff") == set()


def test_a_token_in_two_files_shows_both_roles(tmp_path: Path) -> None:
    tokens = accepted(tmp_path, trainer=ONE, operator=f"{OTHER}\n{ONE}")
    assert tokens.roles(ONE) == {Role.TRAINER, Role.OPERATOR}


def test_a_token_is_not_kept(tmp_path: Path) -> None:
    (tokens,) = accepted(tmp_path, engine=ONE)._roles.get().values()  # noqa: SLF001
    assert tokens.get()
    assert ONE not in repr(vars(tokens))


def test_tokens_are_changed_while_the_server_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = accepted(tmp_path, engine=ONE)
    (tmp_path / "engine").write_text(f"{ONE}\n{OTHER}\n")
    assert tokens.roles(ONE) == tokens.roles(OTHER) == {Role.ENGINE}
    (tmp_path / "engine").write_text(f"{OTHER}\n")
    assert not tokens.roles(ONE)
    assert tokens.roles(OTHER) == {Role.ENGINE}
    (tmp_path / "engine").write_text("half a tok")
    with caplog.at_level(logging.ERROR):
        assert tokens.roles(OTHER) == {Role.ENGINE}
    assert "engine, line 1: is not a token" in caplog.text
    assert "half a tok" not in caplog.text
    write_private(tmp_path, {"sidecar": ONE.encode()})
    (tmp_path / "engine").unlink()
    assert tokens.roles(ONE) == {Role.SIDECAR}
    assert not tokens.roles(OTHER)


def test_the_mode_that_the_error_asks_for_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = accepted(tmp_path, engine=ONE)
    path = tmp_path / "engine"
    path.write_text(OTHER)
    path.chmod(0o644)
    for _ in range(3):
        assert tokens.roles(ONE) == {Role.ENGINE}
    assert caplog.text.count("chmod 0600") == 1  # a look each second fills no log
    path.chmod(0o600)
    assert tokens.roles(OTHER) == {Role.ENGINE}
    assert not tokens.roles(ONE)


@pytest.mark.parametrize("way", ["files", "contents", "folder"])
def test_an_emptied_folder_revokes_its_tokens_and_takes_new_ones(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "accepted"
    tokens = accepted(folder, engine=ONE, gateway=OTHER)
    for path in list(folder.iterdir()):
        path.write_text("") if way == "contents" else path.unlink()
    if way == "folder":
        folder.rmdir()
    assert not tokens.roles(ONE)
    assert not tokens.roles(OTHER)
    write_private(folder, {"sidecar": ONE.encode()})
    (folder / "engine").unlink(missing_ok=True)
    assert tokens.roles(ONE) == {Role.SIDECAR}


def test_a_damaged_file_keeps_no_token_of_another_role_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = accepted(tmp_path, engine=ONE, gateway=OTHER)
    (tmp_path / "engine").write_text("half a tok")
    (tmp_path / "gateway").write_text("")
    write_private(tmp_path, {"captain": b"c" * 32, "trainer": b"short", "router": b"d" * 32})
    assert tokens.roles(ONE) == {Role.ENGINE}
    assert not tokens.roles(OTHER)
    assert tokens.roles("d" * 32) == {Role.ROUTER}
    assert "captain: is not a role" in caplog.text
    assert "trainer, line 1: is not a token" in caplog.text
    (tmp_path / "trainer").write_text("e" * 32)
    assert tokens.roles("e" * 32) == {Role.TRAINER}


def test_an_emptied_file_of_scrapers_lets_none_in(tmp_path: Path) -> None:
    write_private(tmp_path, {"scrapers": ONE.encode()})
    tokens = TokensOfFile("metrics_token_file", tmp_path / "scrapers")
    assert tokens.has(ONE)
    (tmp_path / "scrapers").write_text("# nobody")
    assert not tokens.has(ONE)
    (tmp_path / "scrapers").write_text(OTHER)
    assert tokens.has(OTHER)


def test_tokens_change_when_kubernetes_swaps_the_folder_of_a_secret(tmp_path: Path) -> None:
    write_private(tmp_path / "..first", {"accepted/engine": ONE.encode()})
    (tmp_path / "..data").symlink_to("..first")
    (tmp_path / "accepted").symlink_to("..data/accepted")
    tokens = AcceptedTokens(tmp_path / "accepted")
    assert tokens.roles(ONE) == {Role.ENGINE}
    write_private(tmp_path / "..second", {"accepted/engine": OTHER.encode()})
    (tmp_path / "..next").symlink_to("..second")
    (tmp_path / "..next").replace(tmp_path / "..data")
    assert tokens.roles(OTHER) == {Role.ENGINE}
    assert not tokens.roles(ONE)


def test_a_caller_presents_the_first_token_of_its_file(tmp_path: Path) -> None:
    write_private(tmp_path, {"file": f"\n# new\n{ONE}\n{OTHER}\n".encode()})
    token = PresentedToken(tmp_path / "file")
    assert token_of([("x", "y"), token.metadata()]) == ONE
    (tmp_path / "file").write_text(OTHER)
    assert token_of([token.metadata()]) == OTHER


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param("", "has no token", id="empty"),
        pytest.param("# only a comment", "has no token", id="comment"),
        pytest.param(f"{ONE}\nshort", "line 2: is not a token", id="short"),
        pytest.param(f"{ONE} {OTHER}", "line 1: is not a token", id="space"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"tokens_dir: .*{problem}"):
        accepted(tmp_path, engine=content)


def test_a_name_that_is_no_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="captain: is not a role; name it one of operator"):
        accepted(tmp_path, captain=ONE)


def test_the_folder_that_kubernetes_keeps_beside_them_is_none(tmp_path: Path) -> None:
    write_private(tmp_path / "..2026", {"engine": ONE.encode()})
    (tmp_path / "engine").symlink_to(tmp_path / "..2026" / "engine")
    assert AcceptedTokens(tmp_path).roles(ONE) == {Role.ENGINE}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_files_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    write_private(tmp_path, {"engine": ONE.encode()})
    (tmp_path / "engine").chmod(mode)
    with pytest.raises(ConfigError, match=f"tokens_dir: .* has mode {mode:04o}.*chmod 0600"):
        AcceptedTokens(tmp_path)
    with pytest.raises(ConfigError, match=r"token_file: .*chmod 0600"):
        PresentedToken(tmp_path / "engine")


@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        pytest.param(0, 0o440, "", id="kubernetes-with-fsGroup"),
        pytest.param(0, 0o644, "chmod 0640", id="root-and-everybody"),
        pytest.param(0, 0o660, "chmod 0640", id="root-and-group-writes"),
        pytest.param(77, 0o600, "belongs to user 77", id="somebody-else"),
    ],
)
def test_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, problem: str
) -> None:
    (tmp_path / "engine").write_text(ONE)
    (tmp_path / "engine").chmod(mode)
    found = list((tmp_path / "engine").stat())
    found[4] = owner
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(found))
    if problem:
        with pytest.raises(ConfigError, match=problem):
            AcceptedTokens(tmp_path)
    else:
        assert AcceptedTokens(tmp_path).roles(ONE) == {Role.ENGINE}


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file: .*nowhere: No such file"):
        PresentedToken(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere has no token; `rollmesh tokens DIR` makes some"):
        AcceptedTokens(tmp_path / "nowhere")


def test_made_tokens_are_private_and_servers_get_digests(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    make_tokens(folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert {folder.stat().st_mode & 0o777, (folder / "accepted").stat().st_mode & 0o777} == {0o700}
    tokens = AcceptedTokens(folder / "accepted")
    for role in Role:
        secret = token_of([PresentedToken(folder / f"{role}.token").metadata()])
        assert secret is not None
        assert tokens.roles(secret) == {role}
        assert secret not in (folder / "accepted" / role).read_text()
    with pytest.raises(FileExistsError, match="is not overwritten"):
        make_tokens(folder)


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        (None, None),
        ([("authorization", f"bearer {ONE}")], ONE),
        ([("authorization", f"Basic {ONE}")], None),
        ([("authorization", b"Bearer x")], None),
        ([("authorization", "Bearer ")], ""),
    ],
)
def test_the_token_of_a_call(
    metadata: list[tuple[str, str | bytes]] | None, token: str | None
) -> None:
    assert token_of(metadata) == token
