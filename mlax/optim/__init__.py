"""Optimizers: frozen descriptions with a guaranteed structure and guaranteed dtypes, and the schedules they follow."""

from typing import TYPE_CHECKING, Any

from mlax.core import missing_name_message as missing_name_message
from mlax.core import name_types as name_types
from mlax.optim._adafactor import Adafactor
from mlax.optim._adam import LAMB, AdaBelief, Adam, AdamW, AdEMAMix, AMSGrad, NAdam, RAdam
from mlax.optim._adam_variants import ADOPT, Adamax, Adan, NAdamW, Yogi
from mlax.optim._averaging import Average, Lookahead
from mlax.optim._base import Optimizer
from mlax.optim._clip import ClipAdaptive, ClipGlobalNorm, ClipNorm, ClipValue
from mlax.optim._galore import GaLore
from mlax.optim._groups import Freeze, Groups, LayerwiseRates, Rates, train_only
from mlax.optim._hyperparams import Beta, Count, NonNegative, Positive, PositiveCount, Rate
from mlax.optim._hyperparams import hyperparam_ranges as hyperparam_ranges
from mlax.optim._hyperparams import hyperparams_at as hyperparams_at
from mlax.optim._hyperparams import number_fields as number_fields
from mlax.optim._lbfgs import LBFGS
from mlax.optim._leafwise import Leafwise
from mlax.optim._muon import Muon
from mlax.optim._noise import GradientNoise
from mlax.optim._optax import FromOptax, from_optax, to_optax
from mlax.optim._packing import Packing
from mlax.optim._prodigy import Prodigy
from mlax.optim._rounding import KahanSummation, MasterWeights, Rounding, RoundToNearest, StochasticRounding
from mlax.optim._rounding import hash_bits as hash_bits
from mlax.optim._rounding import stochastic_round as stochastic_round
from mlax.optim._schedule_free import ScheduleFree, ScheduleFreeSGD
from mlax.optim._sgd import LARS, SGD, Adadelta, Adagrad, Lion, RMSProp
from mlax.optim._sign import Rprop, SignSGD
from mlax.optim._slots import OptimizerState, Slot
from mlax.optim._soap import SOAP
from mlax.optim._sophia import SophiaG
from mlax.optim._update import UpdateContext as UpdateContext
from mlax.optim._wrappers import SAM, Accumulate, Decay, OptimizerWrapper, Plateau, SkipNonFinite
from mlax.optim.schedules import *  # noqa: F403
from mlax.optim.schedules import __all__ as _schedules

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *_schedules,
    "ADOPT",
    "AMSGrad",
    "Accumulate",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Average",
    "Beta",
    "ClipAdaptive",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Count",
    "Decay",
    "Freeze",
    "FromOptax",
    "GaLore",
    "GradientNoise",
    "Groups",
    "KahanSummation",
    "LAMB",
    "LARS",
    "LBFGS",
    "LayerwiseRates",
    "Leafwise",
    "Lion",
    "Lookahead",
    "MasterWeights",
    "Muon",
    "NAdam",
    "NAdamW",
    "NonNegative",
    "Optimizer",
    "OptimizerState",
    "OptimizerWrapper",
    "Packing",
    "Plateau",
    "Positive",
    "PositiveCount",
    "Prodigy",
    "RAdam",
    "RMSProp",
    "Rate",
    "Rates",
    "RoundToNearest",
    "Rounding",
    "Rprop",
    "SAM",
    "SGD",
    "SOAP",
    "ScheduleFree",
    "ScheduleFreeSGD",
    "SignSGD",
    "SkipNonFinite",
    "Slot",
    "SophiaG",
    "StochasticRounding",
    "Yogi",
    "from_optax",
    "to_optax",
]

_ELSEWHERE = {  # names of PyTorch and Optax: what to write here
    "AveragedModel": "optim.Average",
    "Constant": "optim.ConstantSchedule, or the number itself",
    "CosineAnnealingLR": "optim.Cosine, which is passed as the rate",
    "CosineAnnealingWarmRestarts": "optim.WarmRestarts, which is passed as the rate",
    "EMA": "optim.Average",
    "ExponentialLR": "optim.Exponential, which is passed as the rate",
    "LambdaLR": "optim.FunctionSchedule, which is passed as the rate",
    "Linear": "optim.LinearSchedule",
    "LinearLR": "optim.Warmup or optim.LinearSchedule, which is passed as the rate",
    "MultiStepLR": "optim.PiecewiseConstant, which is passed as the rate",
    "MultiSteps": "optim.Accumulate",
    "ReduceLROnPlateau": "optim.Plateau",
    "SequentialLR": "optim.JoinedSchedules, which is passed as the rate",
    "StepLR": "optim.PiecewiseConstant, which is passed as the rate",
    "apply_if_finite": "optim.SkipNonFinite",
    "chain": "one optimizer around the other, such as optim.ClipGlobalNorm(optim.AdamW(1e-3), 1.0)",
    "clip_by_global_norm": "optim.ClipGlobalNorm",
    "cosine_decay_schedule": "optim.Cosine",
    "lr_scheduler": "a schedule as the rate, such as optim.AdamW(optim.Cosine(1e-3, steps))",
    "multi_transform": "optim.Groups",
    "warmup_cosine_decay_schedule": "optim.WarmupCosine",
}

if not TYPE_CHECKING:  # to type checkers a missing name stays missing

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_name_message("mlax.optim", name, __all__, _ELSEWHERE))


name_types(globals())
