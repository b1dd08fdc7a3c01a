"""The door of `rollmesh.scorer`: its names for other rooms and tests."""

from rollmesh.scorer.config import ScorerConfig as ScorerConfig
