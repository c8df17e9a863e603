"""Logical axes of parameters: a table from parameter paths to names, and rules from names to the axes of a mesh.

The names are "embed", "heads", "feed_forward", "vocab", "expert" and "layers". `transformer.sharding` turns them into
shardings. Those of activations are in `transformer.partitioning`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformer.config import ConfigError
from transformer.partitioning import LAYERS, AxisRules, current_rules

PARAMETER_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"token_type_embedding/embedding$", (None, "embed")),
    (r"embedding/embedding$", ("vocab", "embed")),
    (r"patch_embedding/kernel$", (None, None, None, "embed")),
    (r"class_token$", ("embed",)),
    (r"conv_\d/kernel$", (None, None, "embed")),
    (r"series_embedding/kernel$", (None, "embed")),
    (r"channel_embedding/kernel$", (None, None, "embed")),
    (r"channel_embedding/bias$", (None, "embed")),
    (r"position_table$", (None, None)),
    (r"(latent|rotary_key)/kernel$", ("embed", None)),
    (r"(query|key|value)/kernel$", ("embed", "heads", None)),
    (r"(query|key|value)/bias$", ("heads", None)),
    (r"attention/out/kernel$", ("heads", None, "embed")),
    (r"sinks$", ("heads",)),
    (r"experts/(up|gate)/kernel$", ("expert", "embed", "feed_forward")),
    (r"experts/down/kernel$", ("expert", "feed_forward", "embed")),
    (r"experts/(up|gate)/bias$", ("expert", "feed_forward")),
    (r"experts/down/bias$", ("expert", "embed")),
    (r"router/kernel$", ("embed", None)),
    (r"router/(bias|selection_bias)$", (None,)),
    (r"(up|gate)/kernel$", ("embed", "feed_forward")),
    (r"(up|gate)/bias$", ("feed_forward",)),
    (r"down/kernel$", ("feed_forward", "embed")),
    (r"head_transform/dense/kernel$", ("embed", None)),
    (r"output/kernel$", ("embed", "vocab")),
    (r"output(/|_)bias$", ("vocab",)),
    (r"(scale|bias|norm/mean|norm/variance)$", ("embed",)),
)
"""path of a parameter (its end; the first match counts) -> logical axes; a leading axis of layers is not listed"""

PARAMETER_AXES: dict[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "feed_forward": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
"""logical axis of a parameter -> the mesh axis that splits it, unless `rules` say otherwise"""


def parameter_axes(path: str, shape: Sequence[int]) -> tuple[str | None, ...]:
    """Logical name of each axis of the parameter at `path`, "layers" for a leading axis of layers; () when no rule of
    `PARAMETER_RULES` matches.

    The state of an optimizer has the path of its parameter behind its own (`0/mu/decoder/...`) and the same axes.
    """
    names = next((names for pattern, names in PARAMETER_RULES if re.search(pattern, path)), ())
    if not names or len(shape) - len(names) not in (0, 1):
        return ()
    return (*[LAYERS] * (len(shape) - len(names)), *names)


def rules_in_force(rules: AxisRules | None) -> AxisRules | None:
    """These rules, else those that activations follow: of `partitioning.axis_rules` or of `nn.logical_axis_rules`. None
    when there are none. ConfigError: rules that are no pairs.
    """
    if rules is None:
        return current_rules()
    for rule in [rules] if isinstance(rules, Mapping | str) else rules:
        target = rule[1] if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str) else 0
        if not (target is None or isinstance(target, str | tuple | list)):
            raise ConfigError(
                f"rules must be pairs of a logical axis and a mesh axis, a tuple of them or None, such as "
                f"[('embed', 'fsdp'), ('heads', None)], got {rule!r}. For a dict, pass tuple(rules.items())."
            )
    return rules
