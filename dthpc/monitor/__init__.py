"""What a run records about itself: events, metrics, identity. A leaf: it imports no other room."""
