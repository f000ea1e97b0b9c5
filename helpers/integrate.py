"""In a checkout what `nf4_triton` is once installed: `from helpers.integrate import use_nf4_kernel`."""

from helpers.nf4 import *  # noqa: F403
from helpers.nf4 import __all__ as __all__
from helpers.nf4 import __getattr__ as __getattr__  # NF4KernelCallback, which imports transformers
