"""Parts of the build that pyproject.toml cannot express: recipes in the wheel, and the description from README.md."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """Copy `configs/*.py` into the wheel as `transformer/recipes/`, which `transformer/config/_recipe_files.py` reads.

    An editable installation reads `configs/` directly, so that an edited recipe takes effect. `package-dir` in
    pyproject.toml could map one folder to the other, but it does not work together with automatic package discovery.
    """

    def run(self) -> None:
        """Build the package, then add the recipes."""
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that the build creates."""
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._recipes().values())]

    def get_source_files(self) -> list[str]:
        """Return the files that a source distribution must contain."""
        return [*super().get_source_files(), *self._recipes()]

    def _recipes(self) -> dict[str, str]:
        """Return {source: target}. Sources are relative to this file, as setuptools requires."""
        folder = Path(self.build_lib, "transformer", "recipes")
        return {f"configs/{path.name}": str(folder / path.name) for path in sorted((ROOT / "configs").glob("*.py"))}


def long_description() -> str:
    """Return README.md for the package index: relative images removed, relative links replaced by their text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^(```.*?^```)$", readme, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):  # parts with odd indices are code blocks
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", parts[index])
        parts[index] = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    return "".join(parts)


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
