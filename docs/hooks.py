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
    if path.startswith("transformer/") and path.endswith(".py"):
        return f"[{text}][{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}]"
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
    return text if path in text else f"{text} (`{path}`)"


def directives(module):
    """One directive a file: of a package all files, each with the names that are its own."""
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))
    lines = []
    for file in files:
        names = own_names(ast.parse(file.read_text(encoding="utf-8")))
        dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        lines += [f"::: {dotted}", "    options:", f"      members: [{', '.join(names)}]", ""]
    return "\n".join(lines)


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
