"""What the site needs beside the pages as GitHub shows them. MkDocs calls the functions whose names begin with on_."""

import ast
import html
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE | re.DOTALL)
OUTWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+|[\w-]+/?)(?:#[^)\s]*)?\)")  # or to a folder
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_markdown(markdown, page, config, files):
    """Comments go, links that leave docs/ lead to the reference or the repository, directives are spelled out."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(text):
        text = OUTWARD.sub(lambda match: outward(match, folder, config.repo_url), COMMENT.sub("", text))
        return DIRECTIVE.sub(lambda match: directives(match[1]), text)

    parts = FENCED.split(markdown)  # every other one is a fenced block
    return "".join(part if place % 2 else rewritten(part) for place, part in enumerate(parts))


def outward(match, folder, repository):
    """A link to a file of the package goes to its reference; without a repository any other is the file's path."""
    text, path = match[1], posixpath.normpath(posixpath.join(folder, match[2]))
    if path.startswith("docs/") and path.endswith(".md"):
        return match[0]
    if path.startswith("transformer/") and path.endswith(".py") and is_public(path):
        return f"[{text}][{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}]"
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
    return text if path in text else f"{text} (`{path}`)"


def is_public(path):
    """Whether the reference has a file: those with a leading underscore are private, and packages are not."""
    return not posixpath.basename(path).startswith("_") or path.endswith(("/__init__.py", "/__main__.py"))


def directives(module):
    """One directive for each public name: of a private file those that its room exports, under the room's name; of a
    room, and what is in it, all that `__all__` lists, after the words on the room itself.
    """
    return "\n".join(line for name, members in named(module) for line in directive(name, members))


def directive(name, is_module):
    return [f"::: {name}", *(["    options:", "      members: []"] if is_module else []), ""]


def named(module):
    """(dotted name, whether it is a module) of all that a directive of a page stands for."""
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
    """`__all__` of a file; a room that imports its names late makes it of `_EXPORTS` and `_MODULES`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    if "_EXPORTS" in found:
        names = [name for names in ast.literal_eval(found["_EXPORTS"]).values() for name in names]
        return sorted([*names, *(ast.literal_eval(found["_MODULES"]) if "_MODULES" in found else ())])
    return ast.literal_eval(found["__all__"]) if "__all__" in found else []


def own_names(tree):
    """The public names that a file defines, not those that it imports."""
    for node in tree.body:
        targets = [node] if isinstance(node, ast.ClassDef | ast.FunctionDef) else getattr(node, "targets", [])
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            name = getattr(target, "name", getattr(target, "id", "_"))
            if not name.startswith("_"):
                yield name


def on_page_content(content, page, config, files):
    """Formulas as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert  # of the extra docs; the tests read this file without it

    def formula(match):
        return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(formula, content)
