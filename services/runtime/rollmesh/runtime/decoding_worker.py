"""The process that decodes images. `decoding` starts it and asks it.

Arguments: the limits in bytes and pixels, and the CPU time for one image in seconds. It reads a
line of JSON and the bytes of an image from standard input, answers with a line of JSON and, if
asked, the pixels, and ends with its input. Decoders are C code that SIGPROF ends when their CPU
time is used up, even if the parent has died.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

from rollmesh.runtime.codec.images import ImageLimits, check_image, decode_image
from rollmesh.runtime.errors import InvalidImageError

_BASE_BYTES = 2 * 1024 * 1024 * 1024
_PIXEL_BYTES = 32
"""Address space of the process, in total and for each pixel that an image may have."""


def serve(limits: ImageLimits, cpu_s: float, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        data = requests.read(request["size"])
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        pixels = b""
        try:
            found = check_image(data, "", limits=limits)
            answer = {"type": found.media_type, "width": found.width, "height": found.height}
            if request["pixels"]:
                pixels = decode_image(data).tobytes()
        except InvalidImageError as error:
            answer = {"problem": error.message.removeprefix(": ")}
        except MemoryError:
            answer = {"problem": "takes too much memory; send a smaller image"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_all(answers, json.dumps(answer).encode() + b"\n" + pixels)


def write_all(answers: BinaryIO, data: bytes) -> None:
    """Writes all bytes. A raw file may take only some of them in one write."""
    left = memoryview(data)
    while left:
        left = left[answers.write(left) :]


def main() -> int:
    """Returns the exit code."""
    max_bytes, max_pixels, cpu_s = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    most = _BASE_BYTES + int(max_bytes) + _PIXEL_BYTES * int(max_pixels)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        suppress(BrokenPipeError),  # the parent has gone
        os.fdopen(os.dup(0), "rb") as requests,
        os.fdopen(os.dup(1), "wb", buffering=0) as answers,
    ):
        os.dup2(2, 1)  # nothing else may come between the answers
        serve(ImageLimits(int(max_bytes), int(max_pixels)), float(cpu_s), requests, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
