"""A hook of MkDocs that adds files from outside of docs/: the changelog, and a page for each example.

Pages link to these files by their path in the repository, so that the links also work there. The hook redirects the
links to the generated pages.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


def on_config(config):
    root = Path(config.config_file_path).parent
    examples = [{example.name: f"examples/{example.stem}.md"} for example in sorted((root / "examples").glob("*.py"))]
    config.nav.insert(-1, {"Examples": examples})
    return config


def on_files(files, config):
    root = Path(config.config_file_path).parent
    files.append(File.generated(config, "changes.md", content=(root / "CHANGELOG.md").read_text()))
    for example in sorted((root / "examples").glob("*.py")):
        text = f"# examples/{example.name}\n\n```python\n{example.read_text()}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    here = posixpath.dirname(page.file.src_uri)

    def lead(match):
        name = match.group(1)
        target = "changes.md" if name == "CHANGELOG.md" else name.removesuffix(".py") + ".md"
        return f"]({posixpath.relpath(target, here or '.')})"

    return re.sub(r"\]\((?:\.\./)+(CHANGELOG\.md|examples/\w+\.py)\)", lead, markdown)
