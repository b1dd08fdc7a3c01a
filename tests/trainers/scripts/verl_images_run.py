"""A row with images: our columns, and those that verl's own agent loop makes of it."""

import json
import sys
from types import SimpleNamespace
from typing import Any

arguments = json.loads(sys.argv[1])
sys.path[:0] = arguments["path"]  # of torchvision, before anything imports it

import torch  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.utils import hf_processor, hf_tokenizer  # noqa: E402

from rollmesh.batches import ImageProcessor, pad, ragged, rows_of, to_torch  # noqa: E402
from rollmesh.integrations.verl import queue_rows  # noqa: E402
from rollmesh.runtime.codec import decode_image  # noqa: E402
from tests.batches.pictured import pictured  # noqa: E402


def main() -> None:
    model, prompt = arguments["model"], {"uid": "u", "global_steps": 1}
    processor = ImageProcessor(model)
    sessions = [pictured(model, order) for order in ([0, 1, 0], [1], [])]
    made = [queue_rows(rows_of([one]), prompt, processor=processor) for one in sessions]
    worker: Any = SimpleNamespace(processor=hf_processor(model), tokenizer=hf_tokenizer(model))
    worker._get_mm_processor_kwargs = lambda _: {}  # noqa: SLF001 - verl's own code is run
    found = []
    for session, rows in zip(sessions, made, strict=True):
        row = rows_of([session])
        trajectory = session.trajectories[0]
        files = [session.images[one.sha256].data for one in trajectory.images]
        images = [decode_image(data) for data in files] or None
        output: Any = SimpleNamespace(multi_modal_data={"images": images}, mm_processor_kwargs=None)
        ids = torch.from_numpy(trajectory.token_ids.astype("int64"))[None]
        inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)  # noqa: SLF001
        mask = torch.ones_like(ids)
        positions = AgentLoopWorker._compute_position_ids(worker, ids, mask, inputs)  # noqa: SLF001
        ours = rows.fields["multi_modal_inputs"][0]
        ours = getattr(ours, "data", ours)
        (our_positions,) = rows.fields["position_ids"].unbind()
        found.append(
            {
                "names": [sorted(ours), sorted(inputs)],
                "equal": {
                    name: str(ours[name].dtype) == str(value.dtype)
                    and torch.equal(ours[name], value)
                    for name, value in inputs.items()
                    if name in ours
                },
                "positions": [list(our_positions.shape), list(positions[0].shape)],
                "positions_equal": torch.equal(our_positions, positions[0]),
                "layouts_equal": [
                    torch.equal(to_torch(batch)["position_ids"][0], positions[0][1:])
                    for batch in (pad(row, processor=processor), ragged(row, processor=processor))
                ],
            }
        )
    sys.stdout.write(json.dumps(found))


main()
