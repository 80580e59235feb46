"""The training loop, and everything beside the step as callbacks."""
