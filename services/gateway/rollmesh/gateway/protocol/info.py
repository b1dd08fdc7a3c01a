"""Writes what a gateway serves: its template, its answer format and its settings."""

from rollmesh.chat.parsing.formats import UNKNOWN, AnswerFormat
from rollmesh.chat.templates.profile import Finding, Kind, RefusedOrder, TemplateProfile
from rollmesh.gateway.protocol.responses import write_role
from rollmesh.v1 import chat_pb2, gateway_pb2, template_pb2


def write_template(profile: TemplateProfile, sha256: str) -> template_pb2.TemplateProfile:
    """Returns the proto of a template's profile."""
    return template_pb2.TemplateProfile(
        sha256=sha256,
        kind=write_kind(profile.kind),
        findings=sorted(map(write_finding, profile.findings)),
        refused_orders=map(_write_order, profile.refused),
        image_roles=sorted(map(write_role, profile.image_roles)),
    )


def write_kind(kind: Kind) -> template_pb2.TemplateKind.ValueType:
    """Returns the proto of a kind, which has the same name."""
    return template_pb2.TemplateKind.Value(f"TEMPLATE_KIND_{kind.name}")


def write_finding(finding: Finding) -> template_pb2.TemplateFinding.ValueType:
    """Returns the proto of a finding, which has the same name."""
    return template_pb2.TemplateFinding.Value(f"TEMPLATE_FINDING_{finding.name}")


def write_tool_calls(format_: AnswerFormat) -> gateway_pb2.ToolCallParsing.ValueType:
    """Returns what happens to tool calls in answers of a format."""
    match format_.tools:
        case "none":
            return gateway_pb2.TOOL_CALL_PARSING_TEXT
        case parser if parser == UNKNOWN:
            return gateway_pb2.TOOL_CALL_PARSING_UNKNOWN
        case _:
            return gateway_pb2.TOOL_CALL_PARSING_PARSED


def write_reasoning(format_: AnswerFormat) -> gateway_pb2.ReasoningFormat.ValueType:
    """Returns how reasoning is marked in answers of a format."""
    name = format_.reasoning_name.upper()
    return gateway_pb2.ReasoningFormat.Value(f"REASONING_FORMAT_{name}")


def write_special_text(setting: str) -> gateway_pb2.SpecialTextPolicy.ValueType:
    """Returns the proto of the setting `special_text`."""
    return gateway_pb2.SpecialTextPolicy.Value(f"SPECIAL_TEXT_POLICY_{setting.upper()}")


def _write_order(order: RefusedOrder) -> template_pb2.RefusedOrder:
    place = order.place.upper().replace(" ", "_")
    return template_pb2.RefusedOrder(
        place=template_pb2.MessagePlace.Value(f"MESSAGE_PLACE_{place}"),
        role=chat_pb2.ROLE_UNSPECIFIED if order.role is None else write_role(order.role),
        with_tools=order.with_tools,
        explanation=order.why,
    )
