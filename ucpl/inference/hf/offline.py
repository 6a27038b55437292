"""Classes of transformers, asked on this machine alone: a config is a file that anybody may have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from warnings import catch_warnings, simplefilter

__all__ = ["offline"]

# What transformers and the hub's client look at while they run. A backbone, an attention kernel or a base model that a config
# names would be fetched; a class that it brings along would be offered to be run, for some seconds, at the terminal.
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),
)


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched, and nobody is asked whether to run code of others. What is missing then is the class's error."""
    with ExitStack() as stack:
        for module, name, value in _SWITCHES:
            stack.enter_context(_set(module, name, value))
        stack.enter_context(_quiet())
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, warnings and reports of transformers: standard error is for diagnostics of ours."""
    try:
        logging = import_module("transformers.utils.logging")
        level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    except (ImportError, AttributeError):
        yield
        return
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with catch_warnings():
            simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def _set(module: str, name: str, value: object) -> Iterator[None]:
    try:
        found = import_module(module)
        before = getattr(found, name)
    except (ImportError, AttributeError):  # another release: it has no such switch
        yield
        return
    setattr(found, name, value)
    try:
        yield
    finally:
        setattr(found, name, before)
