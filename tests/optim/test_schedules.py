"""Schedules agree with Optax, PyTorch and their formulas, exactly at the ends, under jit, vmap and scan."""

import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import optim
from mlax.core import frozen
from mlax.optim import schedules
from mlax.optim.schedules import (
    ConstantSchedule,
    Cosine,
    Exponential,
    JoinedSchedules,
    LinearSchedule,
    OneCycle,
    PiecewiseConstant,
    ScaledSchedule,
    WarmRestarts,
    WarmupStableDecay,
)
from tests.optim.schedule_cases import CASES

LAST = 2**31 - 1
REPEATED = ("polynomial by a fraction", "cosine to", "no warmup cosine", "stable cosine", "cyclic of one height")
RARELY = functools.partial(pytest.param, marks=pytest.mark.thorough)
each_case = pytest.mark.parametrize(
    "case", [RARELY(case, id=name) if name in REPEATED else pytest.param(case, id=name) for name, case in CASES.items()]
)


def test_every_public_schedule_has_a_case():
    shown = {type(case.make()).__name__ for case in CASES.values()}
    assert shown == set(schedules.__all__) - {"Schedule"}


@each_case
def test_equal_schedules_are_equal_and_hash_equal(case):
    schedule = case.make()
    assert schedule == case.make() and hash(schedule) == hash(case.make())
    assert schedule != ScaledSchedule(schedule, 2.0)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    if not isinstance(schedule, schedules.FunctionSchedule):  # Python shows a function by its address
        assert eval(repr(schedule), vars(schedules)) == schedule


@each_case
def test_values_agree_with_the_reference(case):
    steps = np.arange(150)
    with jax.numpy_dtype_promotion("standard"):
        want = np.broadcast_to(np.asarray(case.reference(steps), np.float64), steps.shape)
    scale = np.abs(want).max()
    np.testing.assert_allclose(case.make().values(150), want, rtol=3e-6, atol=2e-7 * scale)


@each_case
def test_first_peak_and_last_value_are_exact(case):
    schedule = case.make()
    compiled = jax.jit(schedule)
    together = schedule.values(list(case.exact))
    for value, (step, want) in zip(together, case.exact.items(), strict=True):
        assert [schedule(step), compiled(step), value] == [np.float32(want)] * 3, step


@each_case
def test_all_values_lie_between_the_bounds(case):
    schedule = case.make()
    if isinstance(schedule, schedules.FunctionSchedule):
        assert schedule.bounds is None
        return
    low, high = schedule.bounds
    values = np.float64(schedule.values(150))
    slack = 1e-6 * max(abs(low), abs(high))
    assert low - slack <= values.min() <= values.max() <= high + slack


def test_an_unknown_bound_makes_the_bounds_of_the_whole_unknown():
    unknown = schedules.FunctionSchedule(lambda step: 0.1)
    for schedule in (
        ScaledSchedule(unknown, 2.0),
        JoinedSchedules(((ConstantSchedule(0.1), 5), (unknown, None))),
        schedules.Warmup(unknown, 5),
    ):
        assert schedule.bounds is None


def test_a_function_that_leaves_the_range_is_an_error_or_if_compiled_nan():
    optimizer, trainables = optim.SGD(lambda step: 0.1 - 0.1 * step), {"w": jnp.ones(3)}
    state = optimizer.init(trainables)
    update = jax.jit(optimizer.update)
    for finite in (True, True, False):
        assert jnp.isfinite(update(trainables, state, trainables)[0]["w"]).all() == finite
        last, state = state, state._replace(step=state.step + 1)
    with pytest.raises(ValueError, match=r"SGD: rate is -0\.1, but must be finite, at least 0"):
        optimizer.update(trainables, last, trainables)


@each_case
def test_values_are_those_of_single_calls(case):
    schedule = case.make()
    values = schedule.values(110)
    assert values.dtype == np.float32 and isinstance(values, np.ndarray)
    scale = np.abs(values).max()
    one_by_one = np.asarray([schedule(step) for step in range(0, 110, 5)])
    np.testing.assert_allclose(values[::5], one_by_one, rtol=1e-6, atol=1e-7 * scale)
    chosen = np.asarray([[3, 1], [4, 100]])
    np.testing.assert_allclose(schedule.values(chosen), values[chosen], 1e-6, 1e-7 * scale)


@each_case
def test_all_steps_are_one_compilation(case):
    traces = []

    @jax.jit
    def value(step):
        traces.append(step)
        return case.make()(step)

    values = [value(jnp.int32(step)) for step in (0, 5, 60, 1000)]
    _, scanned = jax.lax.scan(lambda step, _: (step + 1, case.make()(step)), jnp.int32(0), length=101)
    mapped = jax.eval_shape(jax.vmap(case.make()), jax.ShapeDtypeStruct((101,), "int32"))
    assert len(traces) == 1 and mapped.shape == (101,)
    wanted = case.make().values(101)
    atol = 1e-7 * float(abs(wanted).max())
    np.testing.assert_allclose(values[:3], wanted[np.asarray([0, 5, 60])], 1e-6, atol)
    np.testing.assert_allclose(scanned, wanted, 1e-6, atol)


@each_case
def test_a_schedule_is_constant_after_its_length(case):
    schedule = case.make()
    assert schedule.length == case.length
    if case.length is None:
        assert len(set(schedule.values([10, 30, 31, 35, 10**3, 10**6]).tolist())) > 2
    else:
        beyond = schedule.values([case.length + extra for extra in (0, 1, 2, 1000, 10**6)] + [LAST])
        assert len(set(beyond.tolist())) == 1
        assert case.length == 0 or schedule(case.length - 1) != beyond[0]


@each_case
@pytest.mark.parametrize("x64", [RARELY(False), True])
def test_values_are_strongly_typed_float32_for_any_dtype_of_the_step(case, x64):
    schedule = case.make()
    with jax.enable_x64(x64):
        shapes = [jax.eval_shape(schedule, step) for step in (20, np.int64(20), np.uint8(20), jnp.int32(20))]
        for value in (*shapes, schedule(20), schedule(jnp.uint32(20))):
            assert value.dtype == jnp.float32 and not value.weak_type and value.shape == ()
        assert jax.eval_shape(schedule, jax.ShapeDtypeStruct((2, 0, 3), int)).shape == (2, 0, 3)


@pytest.mark.parametrize(
    "name", [name if name in ("cosine", "warmup cosine", "joined") else RARELY(name) for name in CASES]
)
def test_values_do_not_depend_on_the_dtype_of_the_step(name):
    schedule = CASES[name].make()
    with jax.enable_x64(True):
        steps = [20, np.int64(20), np.uint8(20), jnp.int32(20), jnp.int16(20), jnp.uint32(20), jnp.asarray(20)]
        np.testing.assert_allclose(list(map(schedule, steps)), np.asarray(schedule(20)), rtol=1e-6)
        assert schedule(np.zeros((2, 0, 3), int)).shape == (2, 0, 3)


@each_case
def test_steps_near_the_last_do_not_overflow(case):
    schedule = case.make()
    far = schedule.values(np.asarray([2**24 + 1, 2**30, LAST - 1, LAST, 2**31, 2**40, 2**62]))
    assert np.isfinite(far).all()
    assert len(set(far[3:].tolist())) == 1
    assert schedule(2**40) == schedule(LAST) and schedule(-5) == schedule(0)
    with jax.debug_nans(True):
        schedule.values([0, 10, 1000, LAST])


@each_case
def test_a_lengthened_schedule_is_the_same_curve(case):
    steps = np.arange(80)
    schedule, longer = case.make(), case.make().lengthen(3)
    values = schedule.values(steps)
    np.testing.assert_allclose(longer.values(3 * steps), values, 2e-6, 2e-7 * np.abs(values).max())
    if case.length is None:
        assert longer.length is None
    else:  # an exponential meets its end between two steps
        assert 3 * case.length - 3 < longer.length <= 3 * case.length


@each_case
def test_table_and_curve_show_the_values(case):
    schedule = case.make()
    lines = schedule.table(100, rows=6).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].split() == ["step", "value"]
    shown = {int(step): float(value) for step, value in (line.split() for line in lines[1:])}
    assert shown.keys() == {0, 20, 40, 60, 80, 100, *(step for step in schedule.breakpoints if step <= 100)}
    np.testing.assert_allclose(list(shown.values()), schedule.values(list(shown)), rtol=1e-5)

    values = schedule.values(101)
    top, *_, bottom, axis, numbers = schedule.plot_text(100, width=30, height=5).splitlines()
    if values.min() < values.max():
        assert top.split(" │")[0].strip() == f"{values.max():.6g}"
    assert bottom.split(" │")[0].strip() == f"{values.min():.6g}"
    assert numbers.split() == ["0", "100"] and len(top) == len(bottom) == len(axis) == len(numbers)


@pytest.mark.parametrize("name", [name if case.plotted else RARELY(name) for name, case in CASES.items()])
def test_plot_writes_a_png(name, tmp_path):
    CASES[name].make().plot(tmp_path / "schedule.png", 100)
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_equal_schedules_share_one_compilation():
    traces = []

    @frozen
    class Own(schedules.Schedule):
        slope: float
        length = None

        def lengthen(self, times):
            return Own(self.slope / times)

        def at(self, step):
            traces.append(step)
            return step.astype(jnp.float32) * self.slope

    for slope in (0.5, 0.5, 0.25, 0.5):
        assert jax.jit(Own(slope))(jnp.int32(6)) == 6 * slope
    assert len(traces) == 2


def test_the_curve_looks_like_the_schedule():
    assert LinearSchedule(0.0, 1.0, 8).plot_text(width=4, height=2).splitlines() == [
        "1 │⠀⠀⣠⠞",
        "0 │⣠⠞⠁⠀",
        "  └────",
        "   0  8",
    ]


def test_one_cycle_agrees_with_torch():
    # torch 2.13: OneCycleLR(optimizer, max_lr=0.1, total_steps=101), the rate before each step
    want = {
        0: 0.004,
        1: 0.00427565104002732,
        10: 0.02904739632130776,
        28: 0.0995344576688545,
        29: 0.09997516976618613,
        30: 0.09997581421134295,
        31: 0.09985740952939573,
        50: 0.08029841875256725,
        75: 0.027807012733911028,
        99: 4.975461039612925e-05,
        100: 4e-07,
    }
    np.testing.assert_allclose(OneCycle(0.1, 101).values(list(want)), list(want.values()), rtol=2e-6)


def test_cosine_agrees_with_torch():
    # torch 2.13: CosineAnnealingLR(optimizer, T_max=10, eta_min=0.01) from 0.5
    want = [0.5, 0.48800884649231263, 0.4532091636218621, 0.39900738681165593, 0.33070916362186215, 0.255]
    want += [0.17929083637813792, 0.11099261318834411, 0.05679083637813791, 0.021991153507687385, 0.01]
    np.testing.assert_allclose(Cosine(0.5, 10, end=0.01).values(11), want, rtol=1e-6)


def test_restarts_agree_with_torch():
    # torch 2.13: CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2) from 0.5
    want = [0.5, 0.42677669529663687, 0.25, 0.07322330470336313, 0.5, 0.4809698831278217, 0.42677669529663687]
    want += [0.34567085809127246, 0.25, 0.15432914190872757, 0.07322330470336313, 0.019030116872178315, 0.5]
    np.testing.assert_allclose(WarmRestarts(Cosine(0.5, 4), 3, stretch=2).values(13), want, rtol=1e-6)


def test_steps_are_counted_exactly_where_float32_no_longer_can():
    boundary = 2**30 + 1
    steps = boundary + np.arange(-2, 3)
    assert PiecewiseConstant(1.0, ((boundary, 0.5),)).values(steps).tolist() == [1.0, 1.0, 0.5, 0.5, 0.5]
    late = JoinedSchedules(((ConstantSchedule(1.0), boundary), (LinearSchedule(1.0, 0.0, 4), None)))
    assert late.values(steps).tolist() == [1.0, 1.0, 1.0, 0.75, 0.5]
    decay = WarmupStableDecay(1.0, 0, boundary + 2, 4)
    assert decay.values(steps).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("make", [LinearSchedule, lambda start, end, steps: Cosine(start, steps, end)])
def test_no_digits_cancel_near_the_end(make):
    steps = 10**6
    left = 3 / steps
    want = {"LinearSchedule": left, "Cosine": math.sin(math.pi / 2 * left) ** 2}
    schedule = make(1.0, 0.0, steps)
    np.testing.assert_allclose(schedule(steps - 3), want[type(schedule).__name__], rtol=1e-6)


def test_a_factor_near_one_keeps_its_digits():
    np.testing.assert_allclose(Exponential(1.0, 0.999999)(10**6), 0.999999**1e6, rtol=1e-6)


def test_a_hyperparameter_takes_a_function_of_the_step():
    weights = {"kernel": jnp.ones((2, 2))}
    for function in (lambda step: 0.5 ** (step + 1), optax.exponential_decay(0.5, 1, 0.5)):
        optimizer = optim.SGD(function)
        new, state = jax.jit(optimizer.update)(weights, optimizer.init(weights), weights)
        assert new["kernel"][0, 0] == 0.5
        assert jax.jit(optimizer.update)(weights, state, weights)[0]["kernel"][0, 0] == 0.75
    assert optim.SGD(function) == optim.SGD(function)


def test_a_function_that_returns_no_number_is_an_error():
    with pytest.raises(TypeError, match="must return a number"):
        optim.FunctionSchedule(lambda step: jnp.zeros(3))(0)
    with pytest.raises(TypeError, match="not a function of the step"):
        optim.FunctionSchedule(3.0)
