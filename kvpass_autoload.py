"""Makes ``lm_eval --model kvpass`` work with lm-evaluation-harness 0.4.13, which has no plugins.

torch calls :func:`hook` at the end of its own import (entry-point group ``torch.backends``), and the harness imports
torch before it looks its model up. A module of its own, so that ``import torch`` in another program runs nothing of the
package ``kvpass``.
"""

from __future__ import annotations

import logging
import sys


def hook() -> None:
    """Tell the harness where its model "kvpass" is, if the harness is what is importing torch; never raises."""
    if "lm_eval" not in sys.modules:
        return
    try:
        import lm_eval.models  # noqa: F401  # first: the harness adds its own models only to an empty registry
        from lm_eval.api.registry import model_registry

        if "kvpass" not in model_registry:
            model_registry.register("kvpass", target="kvpass.lm_eval:KVPassLM")
    except Exception:  # an error here would make `import torch` fail
        logging.getLogger("kvpass").warning("lm_eval will not know the model 'kvpass'", exc_info=True)
