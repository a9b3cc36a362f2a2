"""Compares the layer classes that models declare with those that are found by repetition, for all of Transformers.

    python -m scripts.bench layer_classes            every base model of the installed Transformers, on the meta device
    python -m scripts.bench layer_classes --only bert

The plugin wraps the classes in ``_no_split_modules``. For a model that declares none, it wraps the classes that repeat
in the outermost lists of modules (:meth:`hf_fsdp_plugin.plan.modules.ModuleTree.repeated_classes`). Here both are
compared for the models that declare some. Declared classes that do not repeat in a list, such as embeddings, do not
count.

A model is ``equal`` if the classes are the same; it has ``other classes`` if every declared layer is in a found one or
contains one, such as a stage of a vision model, or if layers are found that the model does not declare. Writes
docs/results/layer_classes.json. Exit code 1 if less than 95% are equal or have other classes.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_fsdp_plugin.plan.modules import ModuleTree, class_names, no_split_classes
from hf_fsdp_plugin.plan.names import ancestors
from scripts.bench.common import describe_machine, make_parser

SECONDS = 60
"""Limit for one model."""
NEEDED = 0.95
_PLACE = re.compile(r" from '[^']*'?")
"""The file of a module in an error: a folder of this machine."""


def compare(model: nn.Module) -> dict[str, Any] | None:
    """Return the declared and the found classes; ``None`` if the model declares no layer that repeats."""
    declared = set(no_split_classes(model))
    layers: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child).__name__ for child in module)
            for key, child in module.named_children():
                if counts[type(child).__name__] > 1 and not declared.isdisjoint(class_names(child)):
                    layers[f"{path}.{key}" if path else key] = type(child).__name__
    if not layers:
        return None
    found = set(ModuleTree(model).repeated_classes())
    units = {path for path, module in model.named_modules() if type(module).__name__ in found}
    around = {"", *(outer for unit in units for outer in ancestors(unit))}
    covers = all(path in around or not units.isdisjoint(ancestors(path)) for path in layers)
    names = sorted(set(layers.values()))
    return {"equal": found == set(names), "covers": covers, "declared": names, "found": sorted(found)}


def main() -> int:
    parser = make_parser(__doc__, "layer_classes")
    parser.add_argument("--only", nargs="+", default=[], help="model types that contain one of these texts")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too slow")))
    models: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for name, config_class in CONFIG_MAPPING.items():
        if args.only and not any(text in name for text in args.only):
            continue
        signal.alarm(SECONDS)
        if config_class not in MODEL_MAPPING:
            continue
        try:
            model_class = MODEL_MAPPING[config_class]
            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
            with torch.device("meta"):
                compared = compare(model_class(config_class()))
        except Exception as error:
            counts["cannot be created"] += 1
            models[name] = {"error": _PLACE.sub("", f"{type(error).__name__}: {error}")[:150]}
            continue
        finally:
            signal.alarm(0)
        if compared is None:
            counts["declares no layers"] += 1
            continue
        models[name] = compared
        outcome = "equal" if compared["equal"] else "other classes" if compared["covers"] else "layers not found"
        counts[outcome] += 1
        if outcome != "equal":
            print(f"{name}: {outcome}: declared {compared['declared']}, found {compared['found']}", flush=True)
    share = (counts["equal"] + counts["other classes"]) / max(1, len(models) - counts["cannot be created"])
    print(dict(counts), f"all declared layers found: {share:.1%}")
    result = {**describe_machine(), "counts": dict(counts), "agreement": round(share, 4), "models": models}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if share >= NEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
