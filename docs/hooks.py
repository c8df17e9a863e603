"""MkDocs hooks: changes to the pages for the site. MkDocs calls the functions whose names begin with on_."""

import ast
import html
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE | re.DOTALL)
# Links that leave the folder of their page, and links to a folder.
OUTWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+|[\w-]+/?)(?:#[^)\s]*)?\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_markdown(markdown, page, config, files):
    """Remove comments, point links that leave docs/ to the reference or the repository, and expand directives."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(text):
        text = OUTWARD.sub(lambda match: outward(match, folder, config.repo_url), COMMENT.sub("", text))
        return DIRECTIVE.sub(lambda match: directives(match[1]), text)

    parts = FENCED.split(markdown)  # parts with odd indices are fenced blocks
    return "".join(part if place % 2 else rewritten(part) for place, part in enumerate(parts))


def outward(match, folder, repository):
    """Point a link to a package file to its reference page, and any other link to the repository.

    Without a repository address, the other links become their text followed by the path of the file.
    """
    text, path = match[1], posixpath.normpath(posixpath.join(folder, match[2]))
    if path.startswith("docs/") and path.endswith(".md"):
        return match[0]
    if path.startswith("transformer/") and path.endswith(".py") and is_public(path):
        return f"[{text}][{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}]"
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
    return text if path in text else f"{text} (`{path}`)"


def is_public(path):
    """Return whether the reference documents a file. Files with a leading underscore are private, except packages."""
    return not posixpath.basename(path).startswith("_") or path.endswith(("/__init__.py", "/__main__.py"))


def directives(module):
    """Return one directive per public name.

    For a private file: the names that its package exports, under the name of the package. For a package: its docstring,
    then all names in `__all__` of the package and of its public files and subpackages.
    """
    return "\n".join(line for name, members in named(module) for line in directive(name, members))


def directive(name, is_module):
    return [f"::: {name}", *(["    options:", "      members: []"] if is_module else []), ""]


def named(module):
    """Return (dotted name, whether it is a module) of everything that a directive on a page covers."""
    path = ROOT / module.replace(".", "/")
    if path.name.startswith("_") and path.name != "__main__":
        room = module.rpartition(".")[0]
        offered = exports(ROOT / room.replace(".", "/") / "__init__.py")
        names = own_names(ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")))
        return [(f"{room}.{name}", False) for name in names if name in offered]
    if not path.is_dir():
        return [(module, True), *((f"{module}.{name}", False) for name in exports(path.with_suffix(".py")))]
    offered = exports(path / "__init__.py")
    files = [file.stem for file in sorted(path.glob("*.py")) if is_public(file.name)]
    found = [(module, True), *((f"{module}.{name}", False) for name in offered if name not in files)]
    below = [folder.parent.name for folder in sorted(path.glob("*/__init__.py"))]
    for name in [file for file in files if not file.startswith("_")] + below:
        found += [one for one in named(f"{module}.{name}") if one[1] or one[0].rpartition(".")[2] not in offered]
    return found


def exports(path):
    """Return `__all__` of a file. Packages with lazy imports compute it from `_EXPORTS` and `_MODULES`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    if "_EXPORTS" in found:
        names = [name for names in ast.literal_eval(found["_EXPORTS"]).values() for name in names]
        return sorted([*names, *(ast.literal_eval(found["_MODULES"]) if "_MODULES" in found else ())])
    return ast.literal_eval(found["__all__"]) if "__all__" in found else []


def own_names(tree):
    """Yield the public names that a file defines; imported names are left out."""
    for node in tree.body:
        targets = [node] if isinstance(node, ast.ClassDef | ast.FunctionDef) else getattr(node, "targets", [])
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            name = getattr(target, "name", getattr(target, "id", "_"))
            if not name.startswith("_"):
                yield name


def on_page_content(content, page, config, files):
    """Convert formulas to MathML, which browsers render without JavaScript."""
    from latex2mathml.converter import convert  # from the extra `docs`; the tests import this file without it

    def formula(match):
        block = match[1] == "div"
        drawn = convert(html.unescape(match[2]), display="block" if block else "inline")
        # docs/site.css lets this box scroll; it takes the focus, so that the arrow keys scroll it too
        return f'<div class="formula" tabindex="0">{drawn}</div>' if block else drawn

    return FORMULA.sub(formula, content)
