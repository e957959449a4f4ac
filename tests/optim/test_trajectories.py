"""Fifty steps of every optimizer beside PyTorch's, Optax's and those of the papers' equations in NumPy."""

import jax
import numpy as np
import optax
import pytest
from jax import lax

from mlax import optim
from tests.optim import definitions
from tests.optim.trajectories import (
    ALL,
    GRADS,
    TOLERANCE,
    TORCH_STEPS,
    WEIGHTS,
    assert_follows,
    stack_pairs,
    stack_steps,
    to_flat,
    to_tree,
    torch_trajectory,
    trajectory,
)

EVERY = 10  # steps from one estimate of Sophia's curvature to the next

BY_TORCH = {
    "sgd": optim.SGD(0.1),
    "sgd_momentum": optim.SGD(0.1, momentum=0.9),
    "sgd_nesterov": optim.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": optim.Adagrad(0.1),
    "adagrad_start": optim.Adagrad(0.1, start=0.1),
    "rmsprop": optim.RMSProp(0.01),
    "rmsprop_centred": optim.RMSProp(0.01, centred=True),
    "rmsprop_momentum": optim.RMSProp(0.01, momentum=0.9),
    "adadelta": optim.Adadelta(),
    "adam": optim.Adam(0.01),
    "amsgrad": optim.AMSGrad(0.01),
    "adamw": optim.AdamW(0.01, decay=0.1, decayed=ALL),
    "nadam": optim.NAdam(0.01),
    "radam": optim.RAdam(0.01),
    "adamax": optim.Adamax(0.01),
    "rprop": optim.Rprop(start=0.01),
    "adafactor": optim.Adafactor(),
    "adafactor_decay": optim.Adafactor(0.3, decay=0.1, decayed=ALL),
    "l2": optim.Decay(optim.Adam(0.01), 0.1, decayed=ALL, coupled=True),
    "clip_value": optim.ClipValue(optim.Adam(0.01), 0.5),
}

BY_DEFINITION = {
    "adabelief": (optim.AdaBelief(0.01), {"rate": 0.01}),
    "lion": (optim.Lion(0.01, decay=0.1, decayed=ALL), {"rate": 0.01, "decay": 0.1}),
    "lamb": (optim.LAMB(0.01, decay=0.1, decayed=ALL), {"rate": 0.01, "decay": 0.1}),
    "lars": (optim.LARS(1.0, decay=0.1, trust=0.01, decayed=ALL), {"rate": 1.0, "decay": 0.1, "trust": 0.01}),
    "adafactor": (optim.Adafactor(0.3, power=0.5, clip=2.0), {"rate": 0.3, "power": 0.5, "clip": 2.0}),
    "soap": (optim.SOAP(0.01, decay=0.0), {"rate": 0.01, "decay": 0.0}),
    "ademamix": (optim.AdEMAMix(0.01, decay=0.1, decayed=ALL), {"rate": 0.01, "decay": 0.1}),
    "yogi": (optim.Yogi(0.01), {"rate": 0.01}),
    "adan": (optim.Adan(0.01, decay=0.1, decayed=ALL), {"rate": 0.01, "decay": 0.1}),
}

BY_OPTAX = {
    "sgd": (optim.SGD(0.1, momentum=0.8, nesterov=True), optax.sgd(0.1, momentum=0.8, nesterov=True)),
    "rmsprop": (optim.RMSProp(0.01, b2=0.9), optax.rmsprop(0.01, decay=0.9, eps_in_sqrt=False)),
    "adadelta": (optim.Adadelta(0.5), optax.adadelta(0.5, rho=0.9, eps=1e-6)),
    "adam": (optim.Adam(0.01, b1=0.8, b2=0.95, eps=1e-3), optax.adam(0.01, b1=0.8, b2=0.95, eps=1e-3)),
    "adamw": (optim.AdamW(0.01, decay=0.1, decayed=ALL), optax.adamw(0.01, weight_decay=0.1)),
    "adabelief": (optim.AdaBelief(0.01), optax.adabelief(0.01)),
    "lion": (optim.Lion(0.01, decay=0.1, decayed=ALL), optax.lion(0.01, weight_decay=0.1)),
    "lamb": (optim.LAMB(0.01, decay=0.1, decayed=ALL), optax.lamb(0.01, weight_decay=0.1)),
    "lars": (optim.LARS(1.0, decay=0.0, decayed=ALL), optax.lars(1.0, weight_decay=0.0)),
    "ademamix": (optim.AdEMAMix(0.01), optax.contrib.ademamix(0.01)),
    "schedule_free_sgd": (optim.ScheduleFreeSGD(0.1), optax.contrib.schedule_free_sgd(0.1)),
    "adamax": (optim.Adamax(0.01), optax.adamax(0.01)),
    "nadamw": (optim.NAdamW(0.01, decay=0.1, decayed=ALL), optax.nadamw(0.01, weight_decay=0.1)),
    "adopt": (optim.ADOPT(0.01), optax.contrib.adopt(0.01)),
    "sign_sgd": (optim.SignSGD(0.01), optax.sign_sgd(0.01)),
    "prodigy": (
        optim.Prodigy(decay=0.1, decayed=ALL, start=1e-2),
        optax.contrib.prodigy(1.0, weight_decay=0.1, estim_lr0=1e-2),
    ),
    "prodigy_safeguard": (
        optim.Prodigy(0.5, start=1e-2, safeguard_warmup=True),
        optax.contrib.prodigy(0.5, estim_lr0=1e-2, safeguard_warmup=True),
    ),
    "clip_global": (
        optim.ClipGlobalNorm(optim.Adam(0.01), 1.0),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    ),
    "clip_adaptive": (
        optim.ClipAdaptive(optim.Adam(0.01)),
        optax.chain(optax.adaptive_grad_clip(0.01, eps=1e-3), optax.adam(0.01)),
    ),
}


# the equations show in float64; what float32 rounds, the contract and the tests of convergence bound
each_dtype = pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.thorough)])


@each_dtype
@pytest.mark.parametrize("case", BY_TORCH)
def test_trajectories_agree_with_pytorch(case, dtype):
    path = {name: leaf[TORCH_STEPS] for name, leaf in trajectory(BY_TORCH[case], dtype).items()}
    assert_follows(path, torch_trajectory(case), TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("case", BY_DEFINITION)
def test_trajectories_agree_with_the_papers(case, dtype):
    optimizer, settings = BY_DEFINITION[case]
    assert_follows(
        trajectory(optimizer, dtype),
        stack_steps(getattr(definitions, case)(WEIGHTS, GRADS, **settings)),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.thorough) if {case} & {*BY_TORCH, *BY_DEFINITION} else case
        for case in BY_OPTAX
    ],
)
def test_trajectories_agree_with_optax(case):
    optimizer, transformation = BY_OPTAX[case]

    def step(carry, grads):
        updates, state = transformation.update(grads, carry[1], carry[0])
        weights = optax.apply_updates(carry[0], updates)
        return (weights, state), weights

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        weights = to_tree(WEIGHTS, "float64")
        _, path = lax.scan(step, (weights, transformation.init(weights)), to_tree(stack_steps(GRADS), "float64"))
    assert_follows(trajectory(optimizer), to_flat(path), 1e-9)


def test_ademamix_warms_up_its_slow_average():
    path = trajectory(optim.AdEMAMix(0.01, warmup=30))
    assert_follows(path, stack_steps(definitions.ademamix(WEIGHTS, GRADS, rate=0.01, warmup=30)), 1e-9)


LIMITS = {
    "AdEMAMix": (optim.AdEMAMix(0.01, b1=0.0, warmup=5), optim.AdEMAMix(0.01, b1=1e-12, warmup=5)),
    "RAdam": (optim.RAdam(0.01, b2=0.0), optim.RAdam(0.01, b2=1e-12)),
    "RAdam known": (optim.RAdam(0.01, b2=0.75), optim.RAdam(0.01, b2=optim.ConstantSchedule(0.75))),
    "Adam": (optim.Adam(0.01, b1=0.0, b2=0.0, eps=0.0), optim.SignSGD(0.01)),
    "Adam slowly": (optim.Adam(0.01, b2=1 - 2.0**-50), optim.Adam(0.01, b2=1 - 1e-9)),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_number_at_the_end_of_its_range_is_the_limit_of_those_near_it(case):
    found, wanted = map(trajectory, LIMITS[case])
    assert_follows(found, wanted, 1e-5)


@pytest.mark.parametrize(("decay", "other"), [(0.0, 1e-12), (1 - 2.0**-50, None)])
def test_an_average_at_the_end_of_its_range_is_the_last_weights_or_the_mean_of_all(decay, other):
    (_, found), (_, wanted) = (trajectory(optim.Average(optim.Adam(0.01), d), averaged=True) for d in (decay, other))
    assert_follows(found, wanted, 1e-9)


def test_galore_projects_matrices_and_updates_the_rest_as_adamw():
    names = {"tall/kernel": "dense/kernel", "tall/bias": "dense/bias", "wide/kernel": "dense/kernel"}
    weights, *grads = (
        {name: step[leaf].T if name == "wide/kernel" else step[leaf] for name, leaf in names.items()}
        for step in (WEIGHTS, *GRADS)
    )
    kernels = {name: leaf for name, leaf in weights.items() if name.endswith("kernel")}
    reference = definitions.galore(kernels, grads, rate=0.02, rank=2, every=20)
    rest = definitions.adamw({"tall/bias": weights["tall/bias"]}, grads, rate=0.02)
    path = trajectory(optim.GaLore(0.02, decay=0.0, rank=2, every=20), "float64", weights, grads)
    assert_follows(path, stack_steps(reference) | stack_steps(rest), 1e-9)


def test_soap_refreshes_its_bases_every_few_steps():
    path = trajectory(optim.SOAP(0.01, b1=0.9, b2=0.98, decay=0.0, every=3))
    assert_follows(
        path, stack_steps(definitions.soap(WEIGHTS, GRADS, rate=0.01, b1=0.9, b2=0.98, decay=0.0, every=3)), 1e-9
    )


@each_dtype
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_updates_kernels_and_leaves_the_rest_to_adamw(nesterov, dtype):
    names = {"tall/kernel": "dense/kernel", "tall/bias": "dense/bias", "wide/kernel": "dense/kernel"}
    weights, *grads = (
        {name: step[leaf].T if name == "wide/kernel" else step[leaf] for name, leaf in names.items()}
        for step in (WEIGHTS, *GRADS)
    )
    kernels = {name: leaf for name, leaf in weights.items() if name.endswith("kernel")}
    reference = definitions.muon(kernels, grads, rate=0.02, nesterov=nesterov)
    rest = definitions.adamw({"tall/bias": weights["tall/bias"]}, grads, rate=3e-4)
    path = trajectory(optim.Muon(0.02, nesterov=nesterov), dtype, weights, grads)
    assert_follows(path, stack_steps(reference) | stack_steps(rest), TOLERANCE[dtype])


@each_dtype
def test_sophia_uses_its_last_estimate_of_the_curvature(dtype):
    optimizer = optim.SophiaG(0.01, gamma=0.05, decayed=ALL)
    sampled = GRADS[1:6]

    def update(carry, grads):
        trainables, state = optimizer.update(grads, carry[1], carry[0])
        return (trainables, state), trainables

    def estimate(carry, series):
        trainables, state = carry
        return lax.scan(update, (trainables, optimizer.estimate(series[0], state, 8)), series[1])

    with jax.enable_x64(dtype == "float64"):
        trainables = to_tree(WEIGHTS, dtype)
        grads = jax.tree.map(lambda g: g.reshape(-1, EVERY, *g.shape[1:]), to_tree(stack_steps(GRADS), dtype))
        start = trainables, optimizer.init(trainables)
        _, path = lax.scan(estimate, start, (to_tree(stack_steps(sampled), dtype), grads))
        path = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in to_flat(path).items()}
    reference = definitions.sophia_g(WEIGHTS, GRADS, sampled, rate=0.01, gamma=0.05, batch=8, every=EVERY)
    assert_follows(path, stack_steps(reference), TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedule_free_trains_at_y_and_evaluates_at_x(warmup, dtype):
    optimizer = optim.ScheduleFree(0.01, decay=0.1, decayed=ALL, warmup=warmup)
    trained, evaluated = trajectory(optimizer, dtype, averaged=True)
    reference = definitions.schedule_free(WEIGHTS, GRADS, rate=0.01, decay=0.1, warmup=warmup)
    assert_follows(trained, stack_pairs(reference, 0), TOLERANCE[dtype])
    assert_follows(evaluated, stack_pairs(reference, 1), TOLERANCE[dtype])


@each_dtype
def test_lbfgs_without_a_search_follows_the_two_loop_recursion(dtype):
    optimizer = optim.LBFGS(0.3, history=4, max_search_steps=0)

    def gradient(w):
        return w + w**3

    def step(carry, _):
        trainables, state = optimizer.update(jax.tree.map(gradient, carry[0]), carry[1], carry[0])
        return (trainables, state), trainables

    with jax.enable_x64(dtype == "float64"):
        trainables = to_tree({"kernel": WEIGHTS["dense/kernel"].ravel()}, dtype)
        _, path = lax.scan(step, (trainables, optimizer.init(trainables)), length=20)
        path = to_flat(path)
    ws, gs = [WEIGHTS["dense/kernel"].ravel()], [gradient(WEIGHTS["dense/kernel"].ravel())]
    for _ in range(20):
        steps, changes = (list(np.diff(values, axis=0)[-4:]) if len(values) > 1 else [] for values in (ws, gs))
        ws.append(ws[-1] + 0.3 * definitions.lbfgs_direction(gs[-1], steps, changes))
        gs.append(gradient(ws[-1]))
    assert_follows(path, {"kernel": np.stack(ws[1:])}, TOLERANCE[dtype])
