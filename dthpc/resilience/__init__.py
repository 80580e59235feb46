"""Why an attempt ended and what follows: stop flags, exit records, decisions, histories. Free of torch."""
