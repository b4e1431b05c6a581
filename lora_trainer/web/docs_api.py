"""`/api/docs`: these docs without a network: the list, a page as HTML, a search, the images."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.responses import FileResponse

from lora_trainer.core.errors import Problem
from lora_trainer.web.documentation import documentation_folder, read_documentation
from lora_trainer.web.safety import JSON, Refusal

router = APIRouter(prefix="/api/docs", default_response_class=JSON)


@router.get("")
def list_docs(search: Annotated[str | None, Query(max_length=200)] = None) -> Response:
    """All pages in the order of the navigation; with `search` the sections that have all of these words, best first."""
    documentation = read_documentation(documentation_folder())
    if search is not None:
        return JSON({"search": search, "found": documentation.search(search)})
    pages = documentation.pages.values()
    return JSON(
        {
            "pages": [
                {"name": each.name, "title": each.title, "label": each.label, "section": each.section} for each in pages
            ]
        }
    )


@router.get("/files/{name:path}")
def show_docs_file(name: str) -> Response:
    """An image of a page."""
    path = read_documentation(documentation_folder()).images.get(name)
    if path is None:  # only what was listed is served: no name leads out of the folder
        raise Refusal(404, Problem(f"The docs have no file {name[:100]}.", "GET /api/docs lists the pages."))
    return FileResponse(path, media_type="image/png", headers={"cache-control": "private, no-cache"})


@router.get("/{name:path}")
def show_docs_page(name: str) -> Response:
    """A page: its HTML, its headings, and the pages before and after it."""
    documentation = read_documentation(documentation_folder())
    page = documentation.pages.get(name)
    if page is None:
        raise Refusal(404, Problem(f"The docs have no page {name[:100]}.", "GET /api/docs lists them."))
    names = list(documentation.pages)
    at = names.index(name)
    near = {"before": names[at - 1] if at else None, "after": names[at + 1] if at + 1 < len(names) else None}
    headings = [
        {"level": each.heading.level, "text": each.heading.text, "anchor": each.heading.anchor}
        for each in page.sections
        if each.heading.text
    ]
    return JSON(
        {
            "name": name,
            "title": page.title,
            "section": page.section,
            **near,
            "headings": headings,
            "html": documentation.html(page),
        }
    )
