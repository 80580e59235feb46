"""One attempt of a run: the keeper that starts ranks and answers for how they end, the ranks, the lock, the requeue."""
