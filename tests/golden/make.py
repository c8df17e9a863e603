"""Regenerate the golden files: results of the reference, for tests that run without it.

.venv-parity/bin/python tests/golden/make.py [FAMILY ...]
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import transformers
from golden import reference
from golden.case import cases, families, golden_file


def rounded(array):
    """Return an array as nested lists, rounded to six decimal places."""
    return [rounded(part) for part in array] if array.ndim else round(float(array), 6)


def record(case):
    """Return the golden record of a case."""
    with tempfile.TemporaryDirectory() as folder:
        model, tensors = reference.fill(reference.build(case), case, Path(folder))
        results = {name: rounded(value) for name, value in reference.run(model, case, "none").items()}
        values = reference.config_of(Path(folder))
        written = reference.generated(model, case)[:1] if model.can_generate() else None
    return {"config": values, "tensors": tensors, "results": results, "generated": written}


def main(names):
    """Write the files of these families (none: all families)."""
    for family in names or families():
        kept = {name: record(case) for name, case in cases(family).items() if case.golden}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in kept.items())
        golden_file(family).write_text(f'{{"made with": "transformers {transformers.__version__}",\n{lines}}}\n')
        print(f"{golden_file(family)}: {', '.join(kept)}, {golden_file(family).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
