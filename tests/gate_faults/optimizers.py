"""AdamW, in place: as torch has it, honestly rewritten, and broken."""

from kprof.kernels.correctness import Subject

RATE, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1


def adamw(parameter, gradient, mean, square, step):
    _update(parameter, gradient, mean, square, step)


def _update(parameter, gradient, mean, square, step, **changes):
    """Do one step in the dtype of the tensors."""
    decay, correct = changes.get("decay", DECAY), changes.get("correct", True)
    parameter.mul_(1 - RATE * decay)
    mean.lerp_(gradient, 1 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    first, second = (1 - BETA1**step, 1 - BETA2**step) if correct else (1.0, 1.0)
    parameter.addcdiv_(mean, square.sqrt() / second**0.5 + EPS, value=-RATE / first)


ADAMW = Subject(
    "adamw",
    adamw,
    adamw,
    adamw,
    lambda shape, draw: (
        draw.plain(*shape, scale=0.1),
        draw(*shape),
        draw.plain(*shape, scale=0.1),
        draw.plain(*shape, scale=0.1).square(),
        7,
    ),
    ((64, 192), (96, 128)),
    free=(0, 1),
    dtypes=("float32",),
    writes=(0, 2, 3),
)


def in_wide_steps(parameter, gradient, mean, square, step):
    p, g, m, v = (one.double() for one in (parameter, gradient, mean, square))
    _update(p, g, m, v, step)
    for target, value in ((parameter, p), (mean, m), (square, v)):
        target.copy_(value)


def otherwise_ordered(parameter, gradient, mean, square, step):
    mean.copy_(BETA1 * mean + (1 - BETA1) * gradient)
    square.copy_(BETA2 * square + (1 - BETA2) * gradient * gradient)
    update = (mean / (1 - BETA1**step)) / ((square / (1 - BETA2**step)).sqrt() + EPS)
    parameter.copy_(parameter - RATE * DECAY * parameter - RATE * update)


HONEST = {"adamw": (in_wide_steps, otherwise_ordered)}


def no_bias_correction(parameter, gradient, mean, square, step):
    _update(parameter, gradient, mean, square, step, correct=False)


def step_off_by_one(parameter, gradient, mean, square, step):
    _update(parameter, gradient, mean, square, step + 1)


def decay_in_the_gradient(parameter, gradient, mean, square, step):
    _update(parameter, gradient + DECAY * parameter, mean, square, step, decay=0.0)


def eps_inside_the_root(parameter, gradient, mean, square, step):
    mean.lerp_(gradient, 1 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    root = (square / (1 - BETA2**step) + EPS).sqrt()
    parameter.mul_(1 - RATE * DECAY).addcdiv_(mean, root, value=-RATE / (1 - BETA1**step))


def state_not_written(parameter, gradient, mean, square, step):
    _update(parameter, gradient, mean, square.clone(), step)


def last_block_skipped(parameter, gradient, mean, square, step):
    full = parameter.shape[0] // 16 * 16
    _update(parameter[:full], gradient[:full], mean[:full], square[:full], step)


def clears_the_gradient(parameter, gradient, mean, square, step):
    _update(parameter, gradient, mean, square, step)
    gradient.zero_()


WRONG = {
    "adamw": (
        no_bias_correction,
        step_off_by_one,
        decay_in_the_gradient,
        eps_inside_the_root,
        state_not_written,
        last_block_skipped,
        clears_the_gradient,
    )
}
