from __future__ import annotations

import torch
import torch.nn.functional as F

from dthpc.models.losses import count_targets, next_token


def test_loss_is_the_sum_of_negative_log_probabilities_of_counted_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    targets = torch.randint(0, 7, (2, 5), generator=generator)
    targets[0, 3] = targets[1, 0] = -100
    total, count = next_token(logits, targets)
    log_p = logits.double().log_softmax(-1)
    expected = -sum(log_p[b, t, targets[b, t]] for b in range(2) for t in range(5) if targets[b, t] >= 0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    assert (int(count), count.dtype, total.dtype) == (8, torch.int64, torch.float32)


def test_nothing_to_count_is_zero_and_has_a_zero_gradient() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    total, count = next_token(logits, torch.full((1, 3), -100))
    total.backward()
    assert (total.item(), int(count)) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_outputs_are_summed_in_fp32() -> None:
    logits = torch.zeros(1, 4096, 16, dtype=torch.bfloat16)
    total, _ = next_token(logits, torch.zeros(1, 4096, dtype=torch.int64))
    torch.testing.assert_close(total.item(), 4096 * 2.772588722, rtol=1e-5, atol=0)


def test_class_targets_count_too() -> None:
    assert int(count_targets(torch.tensor([1, -100, 2]))) == 2


def test_scores_of_whole_images_are_taken_too() -> None:
    scores = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([3, 9, -100, 0, 4])
    total, count = next_token(scores, labels)
    torch.testing.assert_close(total, F.cross_entropy(scores, labels, reduction="sum"))
    assert int(count) == 4
