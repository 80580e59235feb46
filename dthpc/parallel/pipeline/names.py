"""The names of the pipeline schedules, and what each needs; free of torch."""

from __future__ import annotations

from dthpc.errors import UserError, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "pipedream")


def chunks_of(schedule: str, asked: int | None) -> int:
    """Chunks of layers on each rank: what was asked for, or what the schedule usually has."""
    if asked is not None:
        return asked
    return 2 if schedule in ("interleaved", "zbv") else 1


def mistakes(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[UserError]:
    """What a schedule cannot do, in the configuration's words.

    Args:
        schedule: its name.
        ranks: pipeline degree, at least 1.
        chunks: chunks of layers on each rank, at least 1.
        micro_batches: micro-batches of one rank in a step.
    """
    if schedule not in SCHEDULES:
        return [
            UserError(
                "there is no such pipeline schedule",
                key="parallel.schedule",
                value=schedule,
                instead=nearest(str(schedule), SCHEDULES),
            )
        ]
    if micro_batches < 1:
        return [UserError(f"a step has {micro_batches} micro-batches", instead="at least 1 micro-batch in a step")]
    if ranks == 1:
        return []
    return [*_chunk_mistakes(schedule, chunks), *_micro_batch_mistakes(schedule, ranks, micro_batches)]


def _chunk_mistakes(schedule: str, chunks: int) -> list[UserError]:
    if schedule == "interleaved" or chunks == chunks_of(schedule, None):
        return []
    usual = chunks_of(schedule, None)
    return [
        UserError(
            f"{schedule} has {usual} chunk{'s' if usual > 1 else ''} of layers on each rank",
            key="parallel.chunks",
            value=chunks,
            instead=f"parallel.chunks={usual}, or parallel.schedule=interleaved, which takes any number",
        )
    ]


def _micro_batch_mistakes(schedule: str, ranks: int, micro_batches: int) -> list[UserError]:
    if schedule != "interleaved" or micro_batches % ranks == 0:
        return []
    below, above = micro_batches // ranks * ranks, (micro_batches // ranks + 1) * ranks
    return [
        UserError(
            f"interleaved needs a multiple of the pipeline degree (pp={ranks}) of micro-batches in a step, "
            f"not {micro_batches}",
            key="parallel.schedule",
            value=schedule,
            instead=f"{f'{below} or {above}' if below else above} micro-batches, or parallel.schedule=1f1b, "
            "which takes any number",
        )
    ]
