"""Servers of Harbor that are forked from a process which has their libraries loaded.

Half of what a short-lived server costs is its imports, and each test has a server of its own. It
is a session of its own, and the connection that asked for it closes when it ends.
"""

import json
import os
import select
import signal
import socket
import sys
import tempfile
from importlib import import_module
from pathlib import Path

SERVER = ("harbor.cli.main", "harbor.server.app")
JOB = ("examples.demo.harbor.folders", "agents", "litellm")
"""A server imports these when a job begins."""


def main(name: str) -> None:
    """Forks a server for each connection, until the standard input ends."""
    for one in (*SERVER, *JOB):
        import_module(one)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        os.write(1, b"READY\n")
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    serve(connection)


def serve(connection: socket.socket) -> None:
    """Becomes the server that the connection asks for. Exits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with connection.makefile() as asked:
        given = json.loads(asked.readline())
    os.environ.clear()
    os.environ.update(given["environ"])
    tempfile.tempdir = None
    with Path(os.devnull).open("rb") as nothing, Path(given["log"]).open("ab") as log:
        for stream, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), stream)
    connection.sendall(f"{os.getpid()}\n".encode())
    sys.argv = given["command"]
    sys.exit(import_module("harbor.cli.main").app())


if __name__ == "__main__":
    main(sys.argv[1])
