"""Optimizers: graphs that write parameters and moments, all of them states, from gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import log1p
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.errors import DTypeError, SchedulerError
from opweave.graph.dtypes import DType, bf16, f16, f32, f64, wide_type
from opweave.graph.tensor import Tensor, constant, input
from opweave.leaf_memory import read_leaf, write_state
from opweave.leaves import state
from opweave.ops.operands import as_number
from opweave_training.schedules import SAMPLED, Schedule, as_rate

__all__ = ["SGD", "AdamW", "LossScale", "Optimizer", "all_finite", "clip_by_norm"]

Array = np.ndarray[Any, Any]
Rate = float | Tensor


class Optimizer:
    """What optimizers share: the parameters, the states beside them, and writing both.

    Parameters of half types have a copy in f32 each, the state ``NAME.master``, which is what is optimized; the
    parameter becomes its rounded value (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1). Build
    the optimizer after the parameters have their initial values.

    Args:
        params: name -> state of a float type.

    Options may be functions of the number of the step, counted from 0, as the learning rate is. The graph of a step
    then has inputs for them, whose values `feeds` gives.

    Attributes:
        params: the parameters.
        states: name -> state of everything else that a checkpoint has to hold.
        options: the numbers that it was made with; of functions the values at some steps.
        rate_dtype: in which learning rates are fed: f64 if a parameter is f64, else f32.

    Raises:
        SchedulerError: a parameter that is not a state.
        DTypeError: one that is not of a float type.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params: Final = dict(params)
        self.states: Final[dict[str, Tensor]] = {}
        self.options: Final[dict[str, Any]] = {}
        self._masters: dict[str, Tensor] = {}
        self._fed: dict[str, Schedule] = {}  # name of an input -> its value in a step
        self.rate_dtype: Final = f64 if any(getattr(p, "dtype", None) is f64 for p in self.params.values()) else f32
        for name, param in self.params.items():
            if not isinstance(param, Tensor) or param.leaf is None or param.leaf.kind != "state":
                raise SchedulerError(f"optimizer: parameters are states (ow.state), and {name!r} is {param!r:.60}")
            if not param.dtype.is_float:
                raise DTypeError(f"optimizer: parameters are of a float type; {name!r} is {param.describe()}")
            if param.dtype in (f16, bf16):
                self._masters[name] = master = self._state(f"{name}.master", param.shape, f32)
                write_state(master, read_leaf(param).astype(np.float32))

    def _state(self, name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """A new state of zeros beside the parameters."""
        if name in self.params or name in self.states:
            raise SchedulerError(f"optimizer: no parameter is named {name!r}, as a state of the optimizer is")
        made = self.states[name] = state(name, shape, dtype)
        return made

    def _option(self, name: str, value: Any, checked: Callable[[Any], float]) -> float | Tensor:
        """An option as a number, or the input to which a function of the step is fed. ``checked`` raises."""
        if not callable(value):
            return checked(value)
        for step in SAMPLED:
            checked(value(step))
        self._fed[f"optimizer.{name}"] = lambda step: checked(value(step))
        return input(f"optimizer.{name}", (), self.rate_dtype)

    def feeds(self, step: int) -> dict[str, Array]:
        """The values of the inputs of the step with this number, counted from 0, by name; none where all options are
        numbers. Raises `DTypeError` where a function gives no such number as the option takes."""
        return {name: np.asarray(at(step), self.rate_dtype.numpy) for name, at in self._fed.items()}

    def _beside(self, what: str) -> dict[str, Tensor]:
        """A state ``NAME.what`` of zeros for each parameter, of its shape, in f32 at least."""
        return {name: self._state(f"{name}.{what}", p.shape, wide_type(p.dtype)) for name, p in self.params.items()}

    def step(self, grads: Mapping[str, Tensor], lr: Rate, when: Tensor | None = None) -> dict[str, Tensor]:
        """One step.

        Args:
            grads: name -> gradient, for each parameter; used in this order, after which each gives back its memory.
            lr: the learning rate: a number, or a tensor of shape ().
            when: bool of shape (); where it is False nothing changes. ``None``: always.

        Returns:
            Name -> next version, of parameters and states. A run that needs these makes the step.

        Raises:
            SchedulerError: gradients of other names than the parameters.
        """
        if set(grads) != set(self.params):
            raise SchedulerError(f"optimizer: needs gradients for {sorted(self.params)}, not for {sorted(grads)}")
        written = self._shared(when)
        for name, found in grads.items():
            param = self.params[name]
            weight = self._masters.get(name, param)
            rate = lr if isinstance(lr, Tensor) else ops.full((), as_number("optimizer", "lr", lr), weight.dtype)
            change, beside = self._updated(
                name, weight, ops.cast(found, weight.dtype), ops.cast(rate, weight.dtype), when
            )
            written |= beside
            written[weight.key if weight is not param else name] = new = changed(weight, change, when)
            if weight is not param:
                written[name] = ops.assign(param, ops.cast(new, param.dtype))
        return written

    def _shared(self, when: Tensor | None) -> dict[str, Tensor]:
        """New versions of states that do not belong to one parameter."""
        return {}

    def _updated(
        self, name: str, weight: Tensor, grad: Tensor, lr: Tensor, when: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is added to a parameter, and new versions of the states beside it. They are written before they are
        read, so that their values take no memory of their own."""
        raise NotImplementedError


def changed(state: Tensor, change: Tensor, when: Tensor | None) -> Tensor:
    """The next version of a state, to which ``change`` is added, where ``when`` is True."""
    return ops.accumulate(state, change if when is None else ops.where(when, change, 0.0))


class SGD(Optimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    Args:
        params: name -> state of a float type.
        momentum: share of the velocity that is kept from step to step; 0: there is none. This and ``weight_decay`` may
            be functions of the step.
        nesterov: look ahead along the velocity; needs momentum.
        weight_decay: this share of a parameter is added to its gradient.

    Raises:
        DTypeError: options that are no such numbers.
        SchedulerError, DTypeError: as `Optimizer`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        momentum: float | Schedule = 0.0,
        nesterov: bool = False,
        weight_decay: float | Schedule = 0.0,
    ) -> None:
        super().__init__(params)
        self._momentum: Final = self._option("momentum", momentum, partial(as_share, "SGD", "momentum"))
        self._nesterov: Final = nesterov
        self._decay: Final = self._option("weight_decay", weight_decay, partial(as_rate, "SGD: weight_decay"))
        self._moving: Final = is_used(self._momentum)
        if nesterov and not self._moving:
            raise DTypeError("SGD: nesterov needs a momentum")
        self._velocity: Final = self._beside("velocity") if self._moving else {}
        self.options.update(momentum=sampled(momentum), nesterov=nesterov, weight_decay=sampled(weight_decay))

    def _updated(
        self, name: str, weight: Tensor, grad: Tensor, lr: Tensor, when: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        momentum, decay = of_type(weight, self._momentum, self._decay)
        if is_used(decay):
            grad = grad + decay * weight
        if not self._moving:
            return -lr * grad, {}
        old = self._velocity[name]
        value = momentum * old + grad
        velocity = ops.assign(old, value if when is None else ops.where(when, value, old))
        along = grad + momentum * velocity if self._nesterov else velocity
        return -lr * along, {f"{name}.velocity": velocity}


class AdamW(Optimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``: Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019, algorithm 2. The numbers may be functions of the step; moments are corrected by the present
    beta to the power of the number of steps, as torch does where a scheduler changes betas.

    Args:
        params: name -> state of a float type.
        betas: share of the first and of the second moment that is kept from step to step.
        eps: added to the root of the second moment.
        weight_decay: a step takes this share, times the learning rate, off each parameter.

    Raises:
        DTypeError: options that are no such numbers.
        SchedulerError, DTypeError: as `Optimizer`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        betas: tuple[float | Schedule, float | Schedule] = (0.9, 0.999),
        eps: float | Schedule = 1e-8,
        weight_decay: float | Schedule = 0.01,
    ) -> None:
        super().__init__(params)
        if len(betas) != 2:
            raise DTypeError(f"AdamW: betas are two numbers, not {betas!r}")
        # What is not kept: 1 − β has more digits than β near 1.
        self._rests: Final = [
            self._option(name, _rest(beta), float) for name, beta in zip(("beta1", "beta2"), betas, strict=True)
        ]
        self._eps: Final = self._option("eps", eps, partial(as_rate, "AdamW: eps"))
        self._decay: Final = self._option("weight_decay", weight_decay, partial(as_rate, "AdamW: weight_decay"))
        self._first: Final = self._beside("first_moment")
        self._second: Final = self._beside("second_moment")
        self._steps: Final = self._state("optimizer.steps", (), f32)
        self.options.update(betas=list(map(sampled, betas)), eps=sampled(eps), weight_decay=sampled(weight_decay))

    def _shared(self, when: Tensor | None) -> dict[str, Tensor]:
        return {"optimizer.steps": changed(self._steps, constant(1, f32), when)}

    def _updated(
        self, name: str, weight: Tensor, grad: Tensor, lr: Tensor, when: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        *rests, eps, decay = of_type(weight, *self._rests, self._eps, self._decay)
        moments = []
        for rest, old, value in (
            (rests[0], self._first[name], grad), (rests[1], self._second[name], ops.square(grad)),
        ):  # fmt: skip
            moments.append(changed(old, (value - old) * rest, when))
        first, second = moments
        steps = ops.cast(self._steps + 1.0, weight.dtype)
        first_share, second_share = [_decayed(steps, rest) for rest in rests]
        # Both sides of the fraction times √(1 − β₂ⁿ), which is one pass less over the parameter.
        root = ops.sqrt(-second_share)
        change = (lr * root / first_share) * (first / (ops.sqrt(second) + eps * root))
        if is_used(decay):
            change = change - (lr * decay) * weight
        return change, {f"{name}.first_moment": first, f"{name}.second_moment": second}


def _rest(beta: float | Schedule) -> Any:
    """1 − β of a number, or of a function of the step; anything else stays as it is."""
    if callable(beta):
        return lambda step: _rest(beta(step))
    return 1 - as_share("AdamW", "a beta", beta)


def _decayed(steps: Tensor, rest: float | Tensor) -> Tensor:
    """βⁿ − 1 without cancellation, with 1 − β and n."""
    if isinstance(rest, Tensor):
        return ops.expm1(steps * ops.log1p(-rest))
    return ops.expm1(steps * log1p(-rest)) if rest < 1 else steps * 0.0 - 1.0


def of_type(weight: Tensor, *options: float | Tensor) -> list[Any]:
    """Options in the type of what is optimized."""
    return [ops.cast(option, weight.dtype) if isinstance(option, Tensor) else option for option in options]


def sampled(option: float | Schedule) -> Any:
    """An option as checkpoints tell it from others: a number, or a function's values at some steps."""
    return [float(option(step)) for step in SAMPLED] if callable(option) else float(option)


def is_used(option: float | Tensor) -> bool:
    """Whether an option is fed, or a number other than 0."""
    return isinstance(option, Tensor) or bool(option)


def as_share(op: str, what: str, value: Any) -> float:
    """``value`` as a number from 0 up to but without 1; raises `DTypeError`."""
    number = as_number(op, what, value)
    if not 0 <= number < 1:
        raise DTypeError(f"{op}: {what} is a number from 0 up to 1, not {value!r}")
    return number


def clip_by_norm(grads: Mapping[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients scaled down together where their Euclidean norm is larger than ``max_norm``, and that norm; torch's
    ``clip_grad_norm_``: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.

    Args:
        grads: name -> gradient.
        max_norm: a positive number.

    Returns:
        Name -> gradient, of the same dtypes, and the norm before, f32 (f64 where all gradients are) of shape ().

    Raises:
        DTypeError: no such number.
        SchedulerError: no gradients.
    """
    limit = as_number("clip_by_norm", "max_norm", max_norm)
    if not limit > 0:
        raise DTypeError(f"clip_by_norm: max_norm is a positive number, not {max_norm!r}")
    norm = ops.sqrt(_total(grads, ops.square))
    factor = ops.minimum(limit / (norm + 1e-6), 1.0)
    return {name: grad * ops.cast(factor, grad.dtype) for name, grad in grads.items()}, norm


def _total(grads: Mapping[str, Tensor], of: Any) -> Tensor:
    """The sum of a function of all elements, in f32 at least."""
    if not grads:
        raise SchedulerError("there are no gradients")
    dtype = f64 if all(g.dtype is f64 for g in grads.values()) else f32
    terms = [ops.sum(of(ops.cast(g, dtype))) for g in grads.values()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def all_finite(grads: Mapping[str, Tensor]) -> Tensor:
    """Whether no gradient has NaN or infinities: bool of shape (). May also be False where the sum of all magnitudes is
    beyond f32 (f64 where all gradients are). Raises `SchedulerError` as `clip_by_norm`."""
    total = _total(grads, ops.abs)
    return ops.cast(ops.step(total - total + 1.0), "bool")  # inf − inf is NaN, which is not above 0


LARGEST_SCALE: Final = 2.0**120
"""Where a loss scale stops growing: an infinite one would make every gradient infinite, and halving would not help."""


class LossScale:
    """A factor by which the loss is multiplied, so that small gradients of half types do not become 0; it adapts:
    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, as torch's ``GradScaler``.

    ``ow.gradients(loss, params, scaling.scale)`` gives scaled gradients, `unscaled` undoes it, and `update` doubles the
    scale after ``interval`` steps with finite gradients, and halves it when there are others; such a step is left out
    by ``optimizer.step(grads, lr, finite)``.

    Attributes:
        scale: the state, f32 of shape ().
        states: name -> state, for checkpoints.

    Raises:
        DTypeError: an initial scale or interval that is no positive number.
    """

    def __init__(self, initial: float = 65536.0, interval: int = 2000) -> None:
        first = as_rate("LossScale: initial", initial)
        self._interval: Final = as_rate("LossScale: interval", interval)
        if not (first > 0 and self._interval > 0):
            raise DTypeError(f"LossScale: takes positive numbers, not {initial!r} and {interval!r}")
        self.scale: Final = state("loss_scale", (), f32, fill=first)
        self._good: Final = state("loss_scale.good_steps", (), f32)
        self.states: Final = {"loss_scale": self.scale, "loss_scale.good_steps": self._good}

    def unscaled(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients divided by the scale, in f32 at least, and whether all of them are finite (bool, shape ())."""
        return {name: ops.cast(g, wide_type(g.dtype)) / self.scale for name, g in grads.items()}, all_finite(grads)

    def update(self, finite: Tensor) -> dict[str, Tensor]:
        """The next versions of the states."""
        good = self._good + 1.0
        full = ops.step(good - (self._interval - 0.5))
        grown = ops.where(full, ops.minimum(self.scale * 2.0, LARGEST_SCALE), self.scale)
        return {
            "loss_scale": ops.assign(self.scale, ops.where(finite, grown, self.scale * 0.5)),
            "loss_scale.good_steps": ops.assign(self._good, ops.where(finite, good * (1.0 - full), 0.0)),
        }
