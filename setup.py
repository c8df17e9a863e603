"""What pyproject.toml cannot express: the wheel contains the recipes of configs/, its description the README's text."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """Copies `configs/*.py` into the wheel as `transformer/recipes/`: `transformer/config/_recipe_files.py` reads them.

    An editable installation reads `configs/` itself, so that an edited recipe takes effect. A `package-dir` in
    pyproject.toml could map one folder to the other, but not together with packages that setuptools finds by itself.
    """

    def run(self) -> None:
        """Builds the package, then adds the recipes."""
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that are built."""
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._recipes().values())]

    def get_source_files(self) -> list[str]:
        """The files that a source distribution needs."""
        return [*super().get_source_files(), *self._recipes()]

    def _recipes(self) -> dict[str, str]:
        """Target by source; a source is relative to this file, as setuptools wants it."""
        folder = Path(self.build_lib, "transformer", "recipes")
        return {f"configs/{path.name}": str(folder / path.name) for path in sorted((ROOT / "configs").glob("*.py"))}


def long_description() -> str:
    """README.md without what works only beside its files: relative images are left out, relative links become text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^(```.*?^```)$", readme, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):  # the odd parts are code blocks
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", parts[index])
        parts[index] = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    return "".join(parts)


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
