"""Write the address of the repository into the notebooks, and links that open them in Colab and Kaggle into the pages.

    python notebooks/links.py https://github.com/OWNER/NAME    set or change the address, for a release
    python notebooks/links.py                                  update the links, after a notebook was added
    python notebooks/links.py --check                          exit with status 1 if a file is out of date

The address is stored in one place, pyproject.toml ([project.urls], Repository). Without it the notebooks contain no
address and the pages no links.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/colab.md")
SUBJECTS = {
    "colab_tpu": "train a transformer",
    "finetune_colab": "fine-tune a chat model",
    "pretrained_tpu": "use and fine-tune a pretrained model",
    "sharding": "train on eight devices",
}
ADDRESS = re.compile(r"https://[\w.-]+(?:/[\w.~-]+)+?(?:\.git)?")
CONSTANT = re.compile(r'^REPOSITORY = "[^"]*"', re.MULTILINE)
BLOCK = re.compile(r"(<!-- open-in-colab -->\n).*?(<!-- /open-in-colab -->)", re.DOTALL)
URLS = re.compile(r'^\[project\.urls\]\nRepository = "([^"]*)"\n', re.MULTILINE)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the files, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", help="https address of the repository")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a file is out of date"
    )
    options = parser.parse_args(arguments)
    files = {root / "pyproject.toml": (root / "pyproject.toml").read_text(encoding="utf-8")}
    if options.address is not None:
        if not ADDRESS.fullmatch(options.address):
            parser.error(f"expected an address such as https://github.com/OWNER/NAME, got {options.address!r}")
        files[root / "pyproject.toml"] = with_address(files[root / "pyproject.toml"], options.address)
    address = tomllib.loads(files[root / "pyproject.toml"])["project"].get("urls", {}).get("Repository", "")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        files[path] = notebook(path.read_text(encoding="utf-8"), address)
    for name in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        image = "images/open-in-colab.svg" if name.startswith("docs/") else "docs/images/open-in-colab.svg"
        files[root / name] = BLOCK.sub(lambda match, image=image: match[1] + links(address, image) + match[2], text)
    changed = [path for path, text in files.items() if text != path.read_text(encoding="utf-8")]
    for path in changed:
        print(f"{'differs' if options.check else 'wrote'}: {path.relative_to(root)}")
        if not options.check:
            path.write_text(files[path], encoding="utf-8")
    return int(options.check and bool(changed))


def with_address(text: str, address: str) -> str:
    """Return the text of pyproject.toml with this address in [project.urls]."""
    table = f'[project.urls]\nRepository = "{address.removesuffix(".git")}"\n'
    if URLS.search(text):
        return URLS.sub(table, text)
    before = "\n[project.optional-dependencies]\n"
    assert text.count(before) == 1, f"pyproject.toml has no line {before.strip()}"
    return text.replace(before, f"\n{table}{before}")


def notebook(text: str, address: str) -> str:
    """Return the text of a notebook, formatted like nbformat, with the address in its constant REPOSITORY."""
    content = json.loads(text)
    cells = [cell for cell in content["cells"] if CONSTANT.search("".join(cell["source"]))]
    assert len(cells) == 1, f"expected one cell with the line REPOSITORY, got {len(cells)}"
    source = CONSTANT.sub(f'REPOSITORY = "{address}"', "".join(cells[0]["source"]))
    cells[0]["source"] = source.splitlines(keepends=True)
    return json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def links(address: str, image: str) -> str:
    """Return one line of Markdown per notebook, or an empty string if the address is not on github.com.

    Colab and Kaggle open notebooks on github.com by their address.
    """
    prefix = "https://github.com/"
    if not address.startswith(prefix):
        return ""
    lines = []
    for name, subject in SUBJECTS.items():
        path = f"{address.removeprefix(prefix)}/blob/main/notebooks/{name}.ipynb"
        badge = f"[![Open in Colab]({image})](https://colab.research.google.com/github/{path})"
        lines.append(f"- {badge} [Kaggle](https://kaggle.com/kernels/welcome?src={prefix}{path}) {subject}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
