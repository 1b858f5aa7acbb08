"""The training loop: everything that happens to the weights, in order."""

from __future__ import annotations

from isles.config.sections.training import learning_rate
from isles.errors import ExitCode
from isles.train.finite import check_finite
from isles.train.outer.step import outer_step
from isles.train.parts import Parts
from isles.train.stop import TIME_IS_UP


def train(parts: Parts) -> ExitCode:
    """Train to the end of the run, or to a stop. All ranks must call this.

    Returns:
        OK at the end; REQUEUE or INTERRUPTED after a stop that was asked for, with a checkpoint.
    """
    config, engine, progress = parts.config.training, parts.engine, parts.progress
    while parts.total_steps is None or progress.step < parts.total_steps:
        step = progress.step + 1
        is_recorded = step % config.logging_steps == 0 or step in (1, parts.total_steps)
        parts.meter.clock.step(step)
        parts.agreement.ask(outer=parts.outer is not None and parts.outer.plan())

        # The inner step.
        parts.meter.begin(is_recorded=is_recorded)
        data = parts.loader.step(progress.samples)
        parts.meter.mark("data")
        for index, batch in enumerate(data.micro_batches):
            is_last = index == len(data.micro_batches) - 1
            loss_sum = engine.forward_backward(
                batch, loss_divisor=data.loss_divisor, is_last=is_last
            )
            parts.meter.add(loss_sum)
        parts.meter.mark("forward_backward")
        lr = learning_rate(config, step, parts.total_steps)
        grad_norm = engine.optimizer_step(lr=lr, max_norm=config.max_grad_norm)
        parts.meter.mark("optimizer")
        parts.meter.step_done(
            tokens=data.input_tokens,
            loss_divisor=data.loss_divisor,
            padding_share=data.padding_share,
        )
        progress.advance(
            samples=data.next_sample, tokens=data.input_tokens, target_tokens=data.global_tokens
        )
        parts.recorder.step_done(progress.step)

        # The outer step, between clusters.
        decision = parts.agreement.decide()
        stop = outer_step(parts, decision) or decision.stop

        parts.rebalance()
        evaluates = parts.is_due(config.eval_steps) and progress.step != parts.total_steps
        saves = decision.save or stop or parts.is_due(parts.config.checkpoint.every_steps)
        if is_recorded or evaluates or saves or parts.checks_every_step:
            check_finite(parts)
        if is_recorded:
            parts.record(lr=lr, grad_norm=grad_norm)
        if evaluates:
            parts.evaluate()
        if saves:
            parts.save(wait=bool(stop))
        if stop and stop != TIME_IS_UP:
            return ExitCode(stop)
        if stop == TIME_IS_UP:
            break

    parts.evaluate()
    parts.save(wait=True)
    return ExitCode.OK
