"""Ray's settings where other tests use the machine's cores too."""

# A raylet starts two Python processes before it registers. Ray waits 30 s for either.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
