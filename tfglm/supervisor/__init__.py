"""What systemd runs on a Spark: one rank's engine, its memory guard, its peers, readiness and drain. Torch-free."""
