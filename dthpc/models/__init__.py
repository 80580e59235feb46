"""Models, their initial weights, losses and sizes."""
