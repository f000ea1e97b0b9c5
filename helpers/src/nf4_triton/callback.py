"""Turn the kernel on during training: `Trainer(..., callbacks=[NF4KernelCallback()])`."""

import weakref

from .switch import Switch, check_names, say, use_nf4_kernel

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("NF4KernelCallback needs transformers: pip install transformers") from error


class NF4KernelCallback(TrainerCallback):
    """Switch the kernel on when training begins and off when it ends, for transformers', TRL's and Unsloth's
    trainers. At the end it logs how many dequantizations the libraries did themselves.

    Takes the arguments of use_nf4_kernel. Raises ValueError for an unknown name; with strict, on_train_begin
    raises the same errors as that function. If training is
    interrupted, the kernel stays on until the callback's next training ends or the callback is deleted.
    """

    def __init__(self, *names: str, quiet: bool = False, strict: bool = False):
        check_names(names)
        self.names, self.quiet, self.strict = names, quiet, strict
        self.switch: Switch | None = None

    def __getstate__(self) -> dict:
        return vars(self) | {"switch": None}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._off()
        self.switch = use_nf4_kernel(*self.names, quiet=self.quiet, strict=self.strict)
        weakref.finalize(self, self.switch.off).atexit = False

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self.switch and not self.quiet:
            say(self.switch.summary())
        self._off()

    def _off(self) -> None:
        if self.switch:
            self.switch.off()
        self.switch = None
