"""All targets."""

from benchmarks.fuzz.decoders import answers, http, stored, wire

TARGETS = (*http.TARGETS, *answers.TARGETS, *wire.TARGETS, *stored.TARGETS)
