"""What every rollmesh service shares: serving, errors, config, logs, metrics, arrays."""
