"""A trainer's forward pass over delivered rows, in float32: `python -m tests.vision.trainer_pass`.

It reads pickled sessions and prints, for each of their trajectories, the log-probability of each
token after the first.
"""

import json
import pickle
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from rollmesh.batches import ImageProcessor


def main(model_path: str, sessions: str) -> None:
    processor = ImageProcessor(model_path)
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32).eval()
    found: list[list[float]] = []
    for session in pickle.loads(Path(sessions).read_bytes()):  # noqa: S301 - a test wrote it
        for trajectory in session.trajectories:
            inputs = processor.inputs_of(session, trajectory)
            ids = torch.from_numpy(trajectory.token_ids.astype("int64"))
            positions = torch.from_numpy(inputs.position_ids)
            positions = positions[:, None] if positions.ndim > 1 else positions[None]
            with torch.no_grad():
                logits = model(
                    input_ids=ids[None], position_ids=positions, **inputs.tensors
                ).logits[0]
            logprobs = torch.log_softmax(logits.float(), -1)
            found.append(logprobs[:-1].gather(-1, ids[1:, None])[:, 0].tolist())
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
