"""Speed and memory, measured."""

import os
import warnings

_ENVIRONMENT = {
    "KVPASS_PROGRESS": "0",  # the bar of the command says what runs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is read here, step by step
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
}
"""Of the processes that ``kvpass bench --serve`` starts."""


def set_environment() -> None:
    """Set the variables before vLLM and its libraries read them: when they are imported, which this module does not."""
    os.environ.update(_ENVIRONMENT)
    warnings.simplefilter("ignore")
