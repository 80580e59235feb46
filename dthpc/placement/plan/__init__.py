"""The parts of a placement decision: what is wished, which GPUs, which cores, which memory, which NICs."""
