"""The training loop: everything that happens to the weights, in order."""

from __future__ import annotations

from isles.config.sections.training import learning_rate
from isles.errors import ExitCode
from isles.train.host import collect_garbage, collecting_at_steps
from isles.train.parts import Parts
from isles.train.stop import NOW, TIME_IS_UP, Decision, StopBeforeTraining


def train(parts: Parts) -> ExitCode:
    """Train to the end of the run, or to a stop. All ranks must call this.

    Returns:
        OK at the end; REQUEUE or INTERRUPTED after a stop that was asked for, with a checkpoint.
    """
    with collecting_at_steps():
        return _train(parts)


def _train(parts: Parts) -> ExitCode:
    config, engine, progress = parts.config.training, parts.engine, parts.progress
    while parts.total_steps is None or progress.step < parts.total_steps:
        step = progress.step + 1
        is_recorded = step % config.logging_steps == 0 or step in (1, parts.total_steps)
        parts.meter.clock.step(step)
        # The exchange of requests runs during the step and is read at its end, so that it costs no
        # time.
        plans_outer = parts.outer is not None and parts.outer.plan()
        parts.agreement.ask(outer=plans_outer, is_saving=parts.checkpoints.is_saving)

        # The inner step.
        parts.meter.begin(is_recorded=is_recorded)
        data = parts.loader.step(progress.samples)
        parts.meter.mark("data")
        engine.begin_step(input_tokens=data.input_tokens)
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

        parts.rebalance(data.next_sample - data.first_sample)
        # The last step is evaluated after the loop.
        evaluates = parts.is_due(config.eval_steps) and progress.step != parts.total_steps
        is_due = parts.is_due(parts.config.checkpoint.every_steps)
        saves = parts.agreement.may_save(decision, is_due=is_due) or stop
        # The check waits for the GPU. So do recording, evaluating and saving, so it costs nothing
        # there.
        if is_recorded or evaluates or saves or parts.checks_every_step:
            parts.check_finite()
        if is_recorded:
            parts.record(lr=lr, grad_norm=grad_norm)
        if evaluates:
            parts.evaluate()
        if saves:
            parts.save(wait=bool(stop))
        collect_garbage(progress.step)
        # Time that is up ends the run normally, with an evaluation; other stops only save.
        if stop and stop != TIME_IS_UP:
            return ExitCode(stop)
        if stop == TIME_IS_UP:
            break

    parts.evaluate()
    parts.save(wait=True)
    return ExitCode.OK


def outer_step(parts: Parts, decision: Decision) -> int:
    """Average with other clusters if a round is due. All ranks must call this.

    Only finite weights are sent. After the last inner step all clusters have the same weights.

    Returns:
        An exit code to stop with, as in `end_together`; 0: no further stop.
    """
    if parts.outer is None:
        return 0
    is_last = parts.progress.step == parts.total_steps or decision.stop == TIME_IS_UP
    if decision.outer or is_last:
        parts.check_finite()
    parts.outer.after_inner_step(has_commands=decision.outer)
    if is_last or parts.progress.step == parts.total_steps:  # an average may jump to it
        return end_together(parts)
    return 0


def end_together(parts: Parts) -> int:
    """Give all clusters the same weights after the last inner step. All ranks must call this.

    Returns:
        An exit code if a stop was requested while this cluster waited for other clusters. The next
        attempt then calls this function again. 0: done.

    Raises:
        StopBeforeTraining: the run must end immediately, without saving.
    """
    stop = 0 if parts.outer is None else parts.outer.finish()
    if stop >= NOW:  # a stop is an exit code, TIME_IS_UP or NOW
        raise StopBeforeTraining(ExitCode.INTERRUPTED, "stopped immediately, without saving")
    return stop


def finish_together(parts: Parts) -> int:
    """Complete a run that was stopped after its last step. All ranks must call this.

    Returns:
        As `end_together`. If it is a stop, everything is saved.
    """
    if parts.progress.step == parts.total_steps and not parts.progress.tokens:
        # It joined so late that averages of the other clusters have brought it to the last step.
        parts.recorder.note(
            f"this cluster trained none of the {parts.total_steps} steps, and ends with the "
            "weights of the other clusters"
        )
    stop = end_together(parts) if parts.progress.step == parts.total_steps else 0
    if stop:
        parts.save(wait=True)
    return stop
