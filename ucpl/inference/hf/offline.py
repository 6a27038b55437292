"""Classes of transformers without network access, since any config may be malicious."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from warnings import catch_warnings, simplefilter

__all__ = ["offline"]

# Switches that transformers and the hub's client read. Otherwise a backbone, an attention kernel or a base model that a
# config names would be fetched, and code of the folder would be offered for execution, for some seconds, at the
# terminal.
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),
)


@contextmanager
def offline() -> Iterator[None]:
    """Prevent downloads, and questions about remote code.

    A missing file then is an error of the class.
    """
    with ExitStack() as stack:
        for module, name, value in _SWITCHES:
            stack.enter_context(_set(module, name, value))
        stack.enter_context(_quiet())
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, warnings and reports of transformers.

    Standard error is for ucpl's diagnostics.
    """
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
