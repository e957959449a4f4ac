"""Optimizers: frozen descriptions with a guaranteed structure and guaranteed dtypes, and the schedules they follow."""

from mlax.optim._accumulate import Accumulate
from mlax.optim._adabelief import AdaBelief
from mlax.optim._adadelta import Adadelta
from mlax.optim._adafactor import Adafactor
from mlax.optim._adagrad import Adagrad
from mlax.optim._adam import Adam
from mlax.optim._adamw import AdamW
from mlax.optim._ademamix import AdEMAMix
from mlax.optim._amsgrad import AMSGrad
from mlax.optim._around import Around
from mlax.optim._average import Average
from mlax.optim._clip import ClipAdaptive, ClipGlobalNorm, ClipNorm, ClipValue
from mlax.optim._decay import Decay
from mlax.optim._freeze import Freeze
from mlax.optim._groups import Groups
from mlax.optim._lamb import LAMB
from mlax.optim._lars import LARS
from mlax.optim._lbfgs import LBFGS
from mlax.optim._leafwise import Leafwise
from mlax.optim._lion import Lion
from mlax.optim._lookahead import Lookahead
from mlax.optim._muon import Muon
from mlax.optim._nadam import NAdam
from mlax.optim._numbers import Amount, Beta, Rate, ranges, values_of
from mlax.optim._optax import FromOptax, from_optax, to_optax
from mlax.optim._optimizer import Optimizer
from mlax.optim._packing import Packing
from mlax.optim._plateau import Plateau
from mlax.optim._radam import RAdam
from mlax.optim._rates import LayerwiseRates, Rates
from mlax.optim._rmsprop import RMSProp
from mlax.optim._rounding import Kahan, Master, Nearest, Rounding, Stochastic
from mlax.optim._sam import SAM
from mlax.optim._schedule_free import ScheduleFree
from mlax.optim._sgd import SGD
from mlax.optim._skip_non_finite import SkipNonFinite
from mlax.optim._slot import Slot
from mlax.optim._soap import SOAP
from mlax.optim._sophia_g import SophiaG
from mlax.optim._state import State
from mlax.optim.schedules import *  # noqa: F403
from mlax.optim.schedules import __all__ as _schedules

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *_schedules,
    "AMSGrad",
    "Accumulate",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Amount",
    "Around",
    "Average",
    "Beta",
    "ClipAdaptive",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Decay",
    "Freeze",
    "FromOptax",
    "Groups",
    "Kahan",
    "LAMB",
    "LARS",
    "LBFGS",
    "LayerwiseRates",
    "Leafwise",
    "Lion",
    "Lookahead",
    "Master",
    "Muon",
    "NAdam",
    "Nearest",
    "Optimizer",
    "Packing",
    "Plateau",
    "RAdam",
    "RMSProp",
    "Rate",
    "Rates",
    "Rounding",
    "SAM",
    "SGD",
    "SOAP",
    "ScheduleFree",
    "SkipNonFinite",
    "Slot",
    "SophiaG",
    "State",
    "Stochastic",
    "from_optax",
    "to_optax",
]
