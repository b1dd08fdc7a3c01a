"""A complete GRPO loop in one file, to copy and change.

    rollmesh up --config mesh.toml              # its last line is "UP {json}"
    python examples/train_loop.py --mesh '{json}' --model path/to/model --checkpoint loop.pt

It survives its own death: started again, it continues from the checkpoint and trains nothing twice.
It needs torch, transformers and openai, and nothing else of this folder.
"""

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from rollmesh.batches import group_advantages, pad, rows_of, step_metrics, to_torch
from rollmesh.client import (
    Client,
    Delivery,
    MeshAddresses,
    Retries,
    Session,
    rollout_groups,
)

SAMPLES = 8
"""Sessions of a group."""
GROUPS = 4
"""Groups of a step."""
DELIVERY_S = 600.0


def prompts_of(step: int) -> list[str]:
    """Returns the prompts of a step. A restart gives the same ones."""
    dice = random.Random(step)
    return [f"What is {dice.randrange(10)} plus {dice.randrange(10)}?" for _ in range(GROUPS)]


def score(prompt: str, answer: str) -> float:
    """Returns the reward of an answer."""
    a, b = (int(word.rstrip("?")) for word in prompt.split() if word.rstrip("?").isdigit())
    return float(str(a + b) in answer)


async def agent(prompt: str, session: Session) -> float:
    """Runs one attempt and returns its reward. Any program that speaks chat completions will do."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        answer = await openai.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=32
        )
    return score(prompt, answer.choices[0].message.content or "")


class Policy:
    """The trained model, its optimizer, and the checkpoint of both."""

    def __init__(self, model: Path, checkpoint: Path) -> None:
        """Loads the model, or continues from the checkpoint if there is one."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.version = 0
        self.mesh: dict[str, Any] = {}
        """The trainer's place in the deliveries, with the checkpoint. Empty without one."""
        self._path = checkpoint
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.version, self.mesh = saved["version"], saved["mesh"]

    def save(self, mesh: dict[str, Any]) -> None:
        """Replaces the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "mesh": mesh,
        }
        part = self._path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._path)

    def step(self, deliveries: list[Delivery]) -> float | None:
        """Makes one step of GRPO. Returns the loss, or None if there is nothing to train on."""
        # Failed sessions have no reward, and lost seats have no rows: both are left out.
        rows = rows_of(deliveries, missing_reward="leave_out")
        if not len(rows):
            return None
        batch = pad(rows)
        advantages = torch.from_numpy(group_advantages(batch.trajectories)).float()[:, None]
        tensors = to_torch(batch)
        ids, mask = tensors["token_ids"], tensors["loss_mask"][:, 1:]
        logits = self.model(ids, position_ids=tensors["position_ids"]).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logprobs - tensors["logprobs"][:, 1:])  # against the sampling policy
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -(gain * mask).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


async def train(addresses: MeshAddresses, model: Path, checkpoint: Path, steps: int) -> None:
    """Rolls out, trains, pushes the weights, acknowledges and saves, until `steps` are done."""
    policy = Policy(model, checkpoint)
    async with Client(addresses) as client:
        if policy.mesh:  # of a loop that died: the weights and the deliveries go back to it
            await client.open_run(policy.version, state=policy.mesh)
            await client.load_state_dict(policy.mesh)
            await client.push_weights(policy.model.state_dict(), policy.version)
        async with client.subscribe("trainer", unit="group", credits=2 * GROUPS) as groups:
            if not policy.mesh:
                policy.save(await client.state_dict("trainer"))
            while policy.version < steps:
                async with rollout_groups(
                    client,
                    prompts_of(policy.version),
                    runner=agent,
                    n=SAMPLES,
                    retries=Retries(tries=2),
                ) as ended:
                    outcomes = [outcome async for outcome in ended]
                # Groups that a dead loop has left come first. They are trained too.
                arriving = groups.until(outcomes, timeout_s=DELIVERY_S)
                deliveries = [delivery async for delivery in arriving]
                metrics = step_metrics(deliveries, policy_version=policy.version)
                loss = policy.step(deliveries)
                if loss is not None:
                    metrics["loss"] = loss
                await client.report_step("trainer", policy.version, metrics)  # logs alarms
                policy.version += 1
                await client.push_weights(policy.model.state_dict(), policy.version)
                await groups.acknowledge(*deliveries)
                policy.save(await client.state_dict("trainer", keep=3))
                print(f"step {policy.version} loss {loss} rollout {ended.summary}", flush=True)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mesh", required=True, help='the JSON that `rollmesh up` prints after "UP"'
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder of the model")
    parser.add_argument("--checkpoint", type=Path, default=Path("train_loop.pt"))
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    addresses = MeshAddresses.from_json(given.mesh)
    asyncio.run(train(addresses, given.model, given.checkpoint, given.steps))


if __name__ == "__main__":
    main()
