"""What the benchmarks share: load, workload, systems under test, engines, and meters."""
