"""`rollmesh template check MODEL_DIR`: reports what probing finds about a chat template."""

import argparse
import sys
from pathlib import Path

from rollmesh.chat.images import load_rule
from rollmesh.chat.parsing.detection import choose, known_parsers
from rollmesh.chat.parsing.formats import UNKNOWN, AnswerFormat
from rollmesh.chat.rendering import TemplateRenderError
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.cutter import TemplateRefusedError
from rollmesh.chat.templates.loading import load_model
from rollmesh.chat.templates.probing import REWRITING, TemplateProfile
from rollmesh.chat.tokenizer import ModelFilesError


def report(profile: TemplateProfile, format_: AnswerFormat) -> str:
    """Returns the findings in human-readable form."""
    ends = " or ".join(profile.stops)
    lines = [f"{profile}", "", f"an answer ends with   {ends}"]
    lines.append(f"tool calls            {format_.tools}")
    lines.append(f"reasoning             {format_.reasoning_name}")
    images = " and ".join(sorted(profile.image_roles)) or "none"
    lines.append(f"images in messages of  {images}")
    lines.append(f"probes, complete      {profile.verified}")
    lines.append(f"probes, last turn     {profile.kept}")
    if kept := profile.findings & REWRITING:
        lines += [
            "",
            "The template changes earlier turns as follows; sessions keep the sampled tokens:",
        ]
        lines += [f"  - {finding}" for finding in sorted(kept)]
    if other := profile.findings - REWRITING:
        lines += ["", "It also:"]
        lines += [f"  - {finding}" for finding in sorted(other)]
    if profile.refused:
        lines += ["", "Requests with these orders of roles are refused:"]
        lines += sorted(f"  - {order}: {why}" for order, why in profile.refused.items())
    if format_.one_call:
        lines += ["", "The template allows one tool call: an answer ends before a second."]
    if format_.tools == UNKNOWN:
        lines += [
            "",
            f"Requests with tools are refused: {format_.why}.",
            f"Set tool_parser to one of: {known_parsers()}",
        ]
    return "\n".join(lines)


def main() -> int:
    """Returns the exit code: 0 if the template can be continued, 1 if not."""
    parser = argparse.ArgumentParser(prog="rollmesh template check", description=__doc__)
    parser.add_argument("model", type=Path, help="folder with tokenizer.json and chat template")
    model: Path = parser.parse_args().model
    try:
        template, tokenizer = load_model(model)
        found = Continuation(template, tokenizer, load_rule(model)).profile
    except ModelFilesError as error:
        print(f"rollmesh template check: {error}", file=sys.stderr)
        return 2
    except (TemplateRefusedError, TemplateRenderError) as error:
        print(f"refused: {error}")
        return 1
    format_ = choose(template, tokenizer)
    print(report(found, format_))
    return 0


if __name__ == "__main__":
    sys.exit(main())
