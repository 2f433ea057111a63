"""The typed config of every verb: one dataclass per section and per verb; each field has a type, range and default.

The YAML files in `conf/` repeat the defaults with a comment for each key; a test compares the two. Ranges are
`annotated_types` constraints, choices are `Literal`s, and a mapping with `_target_` (a component) is a `Node`.
"""

from __future__ import annotations

from runner.config.schema.train import Train as Train
from runner.config.schema.verbs import VERBS as VERBS
